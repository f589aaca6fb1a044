"""Memory that processes of this machine have set aside and not touched yet: free to the kernel, and not to others.

Each process that sets memory aside has a file in /dev/shm, which it keeps locked for as long as it lives; the kernel
gives the lock back with its end, whatever ends it. The file lists what the process has mapped, and what it is about to
map. Pages that are in use already are not counted twice: /proc tells which of a mapping's pages there are.
"""

import contextlib
import fcntl
import json
import logging
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wingbeat.runtime.file_lock import locked

logger = logging.getLogger(__name__)
FOLDER = Path("/dev/shm")
PREFIX = "wingbeat-memory."
LOCK_S = 5.0
"""For another engine to settle its limits; then this one goes on all the same."""
_ENTRY_BYTES = 8
_UNTOUCHED = bytes(range(0x40))
"""Highest bytes of the entries of /proc/PID/pagemap for pages that are neither in memory nor swapped out."""


class MemoryPromises:
    """The promises of this process, in a file of its own, and the way to read those of all.

    Args:
        folder: that all processes of the machine share.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._pid = 0
        self._mapped: dict[int, int] = {}
        """Bytes by address."""
        self._ahead = 0
        """Bytes that are settled and not mapped yet."""
        self._turn = threading.Lock()
        self._stale = False
        """Whether the file lacks a change."""

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Hold the other processes' settling up meanwhile: between a look at free memory and the promise of some."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self._folder, LOCK_S))
            except (TimeoutError, OSError) as error:
                logger.warning("Settling memory beside other engines without a lock: %s", error)
            yield

    def promise(self, num_bytes: int) -> None:
        """This process will map so many bytes; in place of what it promised before and has not mapped."""
        self._own()
        self._ahead = num_bytes
        self._write()

    def map(self, memory: mmap.mmap, address: int) -> None:
        """A mapping of this process is promised for as long as it is there."""
        self._own()
        num_bytes = len(memory)
        self._ahead = max(0, self._ahead - num_bytes)
        self._mapped[address] = num_bytes
        self._write()
        weakref.finalize(memory, self._unmap, os.getpid(), address).atexit = False

    def untouched(self) -> int:
        """Bytes that all processes have promised and that take no memory yet."""
        return sum(map(self._untouched_of, self._folder.glob(f"{PREFIX}*")))

    def _unmap(self, pid: int, address: int) -> None:
        if pid == os.getpid():
            self._mapped.pop(address)
            self._write()

    def _own(self) -> None:
        """A forked child does not answer for what its parent has promised."""
        if self._pid != os.getpid():
            self._pid, self._file, self._mapped, self._ahead = os.getpid(), None, {}, 0
            self._turn = threading.Lock()

    def _write(self) -> None:
        """Bring the file up to date, or leave that to the call that is writing the file.

        A mapping ends in whichever thread frees it, and by the garbage collector in the midst of a write: the call
        then must not wait for the write that it interrupts.
        """
        self._stale = True
        while self._stale and self._turn.acquire(timeout=0):
            try:
                self._stale = False
                self._write_once()
            finally:
                self._turn.release()

    def _write_once(self) -> None:
        mapped = self._mapped.copy()  # in one step: the loop over it may meet the end of a mapping
        try:
            if self._file is None:
                path = self._folder / f"{PREFIX}{self._pid}.{secrets.token_hex(4)}"
                self._file = path.open("w")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = json.dumps({"pid": self._pid, "of": _names(), "ahead": self._ahead, "mapped": [*mapped.items()]})
            self._file.seek(0)
            self._file.write(text + "\n")  # a reader stops here, before what is left of a longer text
            self._file.truncate()
            self._file.flush()
        except OSError as error:
            logger.warning("Other engines do not see the memory that this one sets aside: %s", error)

    def _untouched_of(self, path: Path) -> int:
        try:
            with path.open() as file:
                said: dict[str, Any] = json.loads(file.readline())
                if _is_left(file):
                    path.unlink()
                    return 0
        except (OSError, ValueError):
            return 0  # its process has ended, or is writing its first line
        readable = said["of"] == _names()
        return said["ahead"] + sum(
            num_bytes - (_touched(said["pid"], address, num_bytes) if readable else 0)
            for address, num_bytes in said["mapped"]
        )


PROMISES = MemoryPromises()
"""Those of this process."""


def _is_left(file: IO[str]) -> bool:
    """Whether the process that has written a file is gone."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _names() -> str:
    """The namespace in which this process has its number."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _touched(pid: int, address: int, num_bytes: int) -> int:
    """Bytes of a mapping that take memory; 0 where the system does not say."""
    first, last = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    try:
        with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as file:
            file.seek(first * _ENTRY_BYTES)
            entries = file.read((last - first) * _ENTRY_BYTES)
    except OSError:
        return 0
    highest = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]  # little-endian
    return min(num_bytes, len(highest.translate(None, _UNTOUCHED)) * mmap.PAGESIZE)
