"""What a process is at, in memory shared with the one that watches it, also where it cannot say a word any more.

The process stores a few words before and after each piece of its work; nobody waits for anybody.
"""

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

NUM_SIZES = 24
"""Sizes of rounds that are told apart: one for each power of two."""
NAMES_BYTES = 2**16
_BEAT, _WORK, _SIZE, _NUM_NAMES, _NAMES_LENGTH, _SLOWEST = range(6)
_NUM_WORDS = _SLOWEST + NUM_SIZES
PULSE_BYTES = 8 * _NUM_WORDS + NAMES_BYTES
_FORGETTING = 64
"""A round that took exceptionally long counts for less with each that follows: after 150 of its size for a tenth."""


class Work(IntEnum):
    """Kinds of work, which may take unequally long."""

    NONE = 0
    """It waits for work."""
    ROUND = 1
    MESSAGE = 2
    """Such as taking a request."""
    CALL = 3


class Beat(NamedTuple):
    """The piece of work that a process is at."""

    number: int
    """Another one with each piece of work."""
    work: Work
    size: int
    """Tokens of a round; 0 where that is not known."""


class Pulse:
    """Either side; one thread of the process that works stores.

    Args:
        memory: PULSE_BYTES of shared memory, zero at first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[: 8 * _NUM_WORDS].cast("q")
        self._names = memory[8 * _NUM_WORDS : PULSE_BYTES]
        self._last_names: Sequence[str] = ()
        self._began_ns = 0

    def begin(self, work: Work, names: Sequence[str] | None = None) -> None:
        """A piece of work begins.

        Args:
            names: whose it is; None leaves those of the piece before.
        """
        words = self._words
        self._measured()
        words[_WORK], words[_SIZE] = work, 0
        if names is not None and names != self._last_names:
            self._write_names(names)
        words[_BEAT] += 1

    def sized(self, size: int, names: Sequence[str]) -> None:
        """The round that has begun is of so many tokens, and of those requests; the time counts from here.

        Several rounds of one piece of work are told one by one.
        """
        self.begin(Work.ROUND, names)
        self._words[_SIZE] = size
        self._began_ns = time.monotonic_ns()

    def end(self) -> None:
        """What has begun is done, and there is nothing to do."""
        self.begin(Work.NONE, ())

    def read(self) -> Beat:
        """What the other side is at."""
        words = self._words
        return Beat(words[_BEAT], Work(words[_WORK]), words[_SIZE])

    def names(self) -> list[str]:
        """Whose work it is; those that found no room are left out."""
        found = bytes(self._names[: self._words[_NAMES_LENGTH]]).decode(errors="replace").split("\n")
        return found[: self._words[_NUM_NAMES]]

    def slowest_s(self) -> tuple[float, ...]:
        """What rounds have taken lately at the longest, by `size_class`; 0 where there was none."""
        return tuple(1e-9 * value for value in self._words[_SLOWEST:])

    def release(self) -> None:
        """Let go of the memory."""
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
    """Index of a round's size among those that are told apart."""
    return min(size.bit_length() - 1, NUM_SIZES - 1)
