"""Record of a process's current work in shared memory, which a watcher can read even if the process is stuck.

The process stores a few words before and after each piece of work; neither process nor watcher waits for the other.
"""

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

NUM_SIZES = 24
"""Number of size classes of rounds, one per power of two."""
NAMES_BYTES = 2**16
_BEAT, _WORK, _SIZE, _NUM_NAMES, _NAMES_LENGTH, _SLOWEST = range(6)
_NUM_WORDS = _SLOWEST + NUM_SIZES
PULSE_BYTES = 8 * _NUM_WORDS + NAMES_BYTES
_FORGETTING = 64
"""The slowest time of a size class decays: each round of the class reduces that time by 1/64, so a tenth of the time is
left after 150 rounds.
"""


class Work(IntEnum):
    """Kinds of work, which differ in how long they may take."""

    NONE = 0
    """Waiting for work."""
    ROUND = 1
    MESSAGE = 2
    """Handling a message, such as a request."""
    CALL = 3


class Beat(NamedTuple):
    """A process's current piece of work."""

    number: int
    """Counter that changes with each piece of work."""
    work: Work
    size: int
    """Tokens of a round; 0 if unknown."""


class Pulse:
    """Access to the record. In the working process only one thread may write; a watcher process reads.

    Args:
        memory: PULSE_BYTES of shared memory, zero at first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[: 8 * _NUM_WORDS].cast("q")
        self._names = memory[8 * _NUM_WORDS : PULSE_BYTES]
        self._last_names: Sequence[str] = ()
        self._began_ns = 0

    def begin(self, work: Work, names: Sequence[str] | None = None) -> None:
        """Begin a piece of work.

        Args:
            names: ids of the requests that the work belongs to; None keeps the previous ids.
        """
        words = self._words
        self._measured()
        words[_WORK], words[_SIZE] = work, 0
        if names is not None and names != self._last_names:
            self._write_names(names)
        words[_BEAT] += 1

    def sized(self, size: int, names: Sequence[str]) -> None:
        """Record the token count and the requests of the round that has begun, and start measuring the round's time.

        If one piece of work has several rounds, the process calls this method for each round.
        """
        self.begin(Work.ROUND, names)
        self._words[_SIZE] = size
        self._began_ns = time.monotonic_ns()

    def end(self) -> None:
        """End the current piece of work; the process now waits for work."""
        self.begin(Work.NONE, ())

    def read(self) -> Beat:
        """The working process's current work."""
        words = self._words
        return Beat(words[_BEAT], Work(words[_WORK]), words[_SIZE])

    def names(self) -> list[str]:
        """Ids of the requests that the current work belongs to; ids that did not fit into the memory are missing."""
        found = bytes(self._names[: self._words[_NAMES_LENGTH]]).decode(errors="replace").split("\n")
        return found[: self._words[_NUM_NAMES]]

    def slowest_s(self) -> tuple[float, ...]:
        """By `size_class`, the decaying time in seconds of the slowest round; 0 if there was none."""
        return tuple(1e-9 * value for value in self._words[_SLOWEST:])

    def release(self) -> None:
        """Release the memory views."""
        self._words.release()
        self._names.release()

    def _measured(self) -> None:
        size = self._words[_SIZE]
        if size:
            index = _SLOWEST + size_class(size)
            taken, slowest = time.monotonic_ns() - self._began_ns, self._words[index]
            self._words[index] = max(taken, slowest - slowest // _FORGETTING)

    def _write_names(self, names: Sequence[str]) -> None:
        self._last_names = names
        data = "\n".join(names).encode()
        fits = len(data) <= NAMES_BYTES
        data = data[:NAMES_BYTES]
        self._names[: len(data)] = data
        self._words[_NAMES_LENGTH] = len(data)
        self._words[_NUM_NAMES] = len(names) if fits else data.count(b"\n")


def size_class(size: int) -> int:
    """Index of a round's size class."""
    return min(size.bit_length() - 1, NUM_SIZES - 1)
