"""Messages between a process and its child: a ring of shared memory for each direction, and a bell for each side.

The memory has no name; the child inherits its file descriptor, and the kernel frees it when both processes have ended.
The bells are eventfds, because an event loop can poll an eventfd beside its sockets; the drafter's channel uses
futexes, which cannot be polled. A message is pickled and preceded by its length, so a message that is longer than the
ring can be sent in pieces. No method but `wait` blocks, because data that do not fit into the ring stay with the sender
until `flush`.
"""

import contextlib
import mmap
import os
import pickle
import select
from collections import deque
from collections.abc import Iterator
from typing import Any

from wingbeat.cluster.channels.doorbell import fence
from wingbeat.cluster.channels.pulse import PULSE_BYTES, Pulse

CACHE_LINE_WORDS = 8


class Word:
    """Indices of a ring's counters in the ring's int64 words (a memoryview of format "q").

    Each counter has its own cache line and a single writer.
    """

    WRITTEN = 0
    """Bytes written since the ring was created."""
    READ = CACHE_LINE_WORDS
    """Bytes read since the ring was created."""


NUM_WORDS = 2 * CACHE_LINE_WORDS


class Ring:
    """A ring buffer over `words` (format "q", NUM_WORDS long, zero at first) and `body` (format "B")."""

    def __init__(self, words: memoryview, body: memoryview) -> None:
        self._words = words
        self._body = body

    def write(self, data: memoryview) -> int:
        """Write the part of `data` that fits into the ring. Returns the number of bytes written."""
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
        """Return all bytes that were written and not read yet."""
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
        """Bytes that the reader has taken since the ring was created."""
        return self._words[Word.READ]

    @property
    def has_bytes(self) -> bool:
        """Whether there are unread bytes."""
        return self._words[Word.WRITTEN] != self._words[Word.READ]

    def release(self) -> None:
        """Release the memory views."""
        self._words.release()
        self._body.release()


RING_BYTES = 2**20
_WORDS_BYTES = 8 * NUM_WORDS
_LENGTH_BYTES = 8


class Link:
    """Side of a link, for use by one thread; only `wake` may be called from any thread.

    Args:
        memory: file descriptor of the shared memory.
        own_bell, peer_bell: eventfds: this side waits for `own_bell` and rings `peer_bell`.
        is_parent: whether this side is the parent's.
    """

    def __init__(self, memory: int, own_bell: int, peer_bell: int, *, is_parent: bool) -> None:
        self._fds = [memory, own_bell, peer_bell]
        self._own_bell = own_bell
        self._peer_bell = peer_bell
        self._mapping = mmap.mmap(memory, os.fstat(memory).st_size)
        self.pulse = Pulse(memoryview(self._mapping)[-PULSE_BYTES:])
        """Record of the child's current work."""
        rings = [self._ring(0), self._ring(1)]
        self._out, self._in = rings if is_parent else rings[::-1]
        self._backlog: deque[memoryview] = deque()
        self._num_sent = 0
        self._partial = bytearray()
        self._poll = select.poll()
        self._poll.register(own_bell, select.POLLIN)

    @classmethod
    def create(cls, ring_bytes: int = RING_BYTES) -> "Link":
        """The parent's side of a new link."""
        memory = os.memfd_create("wingbeat-link")
        os.ftruncate(memory, 2 * (_WORDS_BYTES + ring_bytes) + PULSE_BYTES)
        own_bell, peer_bell = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        return cls(memory, own_bell=own_bell, peer_bell=peer_bell, is_parent=True)

    @property
    def child_fds(self) -> tuple[int, int, int]:
        """File descriptors for the child to inherit, in the order in which the child passes them to `Link`."""
        memory, own, peer = self._fds
        return memory, peer, own

    def send(self, message: Any) -> int:
        """Send a message and queue the part that does not fit; return the position of its end, for `was_read`.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: the message cannot be pickled; the link is unchanged.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._backlog.append(memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data))
        self._num_sent += _LENGTH_BYTES + len(data)
        self.flush()
        return self._num_sent

    def flush(self) -> None:
        """Write queued bytes as far as they fit into the ring, and ring the peer's bell if bytes were written."""
        rings = False
        while self._backlog:
            data = self._backlog[0]
            count = self._out.write(data)
            rings |= count > 0
            if count < len(data):
                self._backlog[0] = data[count:]
                break
            self._backlog.popleft()
        if rings:
            os.eventfd_write(self._peer_bell, 1)

    @property
    def clogged(self) -> bool:
        """Whether queued bytes do not fit into the ring yet, so that `flush` must be called again."""
        return bool(self._backlog)

    def was_read(self, end: int) -> bool:
        """Whether the peer has read the message that ends at this position."""
        return self._out.num_read >= end

    @property
    def num_unread(self) -> int:
        """Bytes that the peer has not read yet."""
        return self._num_sent - self._out.num_read

    @property
    def num_read(self) -> int:
        """Bytes that the peer has read so far."""
        return self._out.num_read

    def receive(self) -> Iterator[Any]:
        """Yield all complete messages, oldest first; messages that the caller does not take stay for the next call."""
        if self._in.has_bytes:
            self._partial += self._in.read()
        while len(self._partial) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._partial[:_LENGTH_BYTES], "little")
            if len(self._partial) < end:
                return
            data = bytes(self._partial[_LENGTH_BYTES:end])
            del self._partial[:end]
            yield pickle.loads(data)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the peer has rung since the last `wait`, or `wake` was called, or `timeout_s` has passed."""
        self._poll.poll(None if timeout_s is None else 1e3 * timeout_s)
        self.silence()

    def silence(self) -> None:
        """Clear this side's bell. Call this method before reading the messages that the bell announced."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._own_bell)

    def wake(self) -> None:
        """End this side's own `wait`; callable from any thread and from signal handlers."""
        os.eventfd_write(self._own_bell, 1)

    def fileno(self) -> int:
        """File descriptor for an event loop; readable after this side's bell has rung, until `silence` is called."""
        return self._own_bell

    def close(self) -> None:
        """Release this side; the link must not be used any more."""
        for part in (self._out, self._in, self.pulse):
            part.release()
        self._mapping.close()
        for fd in self._fds:
            os.close(fd)

    def _ring(self, index: int) -> Ring:
        half = (len(self._mapping) - PULSE_BYTES) // 2
        whole = memoryview(self._mapping)[index * half : (index + 1) * half]
        return Ring(whole[:_WORDS_BYTES].cast("q"), whole[_WORDS_BYTES:])
