"""A bounded ring of bytes in shared memory: one process writes, one reads, and neither waits for the other."""

from wingbeat.cluster.channels.doorbell import fence

CACHE_LINE_WORDS = 8


class Word:
    """Index of each counter in a ring's words (memoryview of format "q"); each has a cache line and a writer."""

    WRITTEN = 0
    """Bytes written since the ring was made."""
    READ = CACHE_LINE_WORDS
    """Bytes read."""


NUM_WORDS = 2 * CACHE_LINE_WORDS


class Ring:
    """A ring over `words` (format "q", NUM_WORDS long, zero at first) and `body` (format "B")."""

    def __init__(self, words: memoryview, body: memoryview) -> None:
        self._words = words
        self._body = body

    def write(self, data: memoryview) -> int:
        """Write as much of `data` as there is room for; returns how many bytes that was."""
        words, size = self._words, len(self._body)
        written = words[Word.WRITTEN]
        count = min(len(data), size - (written - words[Word.READ]))
        if count:
            start = written % size
            first = min(count, size - start)
            self._body[start : start + first] = data[:first]
            self._body[: count - first] = data[first:count]
            fence()
            words[Word.WRITTEN] = written + count
        return count

    def read(self) -> bytes:
        """Everything that was written and not read yet."""
        words, size = self._words, len(self._body)
        read, written = words[Word.READ], words[Word.WRITTEN]
        if read == written:
            return b""
        fence()
        start, count = read % size, written - read
        first = min(count, size - start)
        data = bytes(self._body[start : start + first]) + bytes(self._body[: count - first])
        fence()
        words[Word.READ] = written
        return data

    @property
    def num_read(self) -> int:
        """Bytes that the reader has taken since the ring was made."""
        return self._words[Word.READ]

    @property
    def has_bytes(self) -> bool:
        """Whether there is something to read."""
        return self._words[Word.WRITTEN] != self._words[Word.READ]

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._body.release()
