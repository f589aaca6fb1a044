"""Tracks memory that processes of this machine have reserved but not used yet, which the kernel counts as free.

Each process that reserves memory has a locked file in /dev/shm; the kernel releases the lock when the process ends, for
whatever reason. The file lists the memory that the process has mapped and the memory that it will map. Pages that are
in use are not counted twice, because /proc/PID/pagemap shows which pages of a mapping are present.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from wingbeat.runtime.file_lock import locked

logger = logging.getLogger(__name__)
FOLDER = Path("/dev/shm")
PREFIX = "wingbeat-memory."
LOCK_S = 5.0
"""Seconds to wait while another engine settles its limits; afterwards this engine continues without the lock."""
_ENTRY_BYTES = 8
_UNTOUCHED = bytes(range(0x40))
"""Highest bytes of the entries of /proc/PID/pagemap for pages that are neither in memory nor swapped out."""


class MemoryPromises:
    """Memory reservations of this process, written to its own file; also reads the files of all processes.

    Args:
        folder: folder that all processes of the machine share.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._pid = 0
        self._mapped: dict[int, int] = {}
        """Mapped bytes by address."""
        self._ahead = 0
        """Bytes that are reserved and not mapped yet."""
        self._turn = threading.Lock()
        self._stale = False
        """Whether the reservations have changed since the file was last written."""

    @contextlib.contextmanager
    def settling(self) -> Iterator[Callable[[int], None]]:
        """Context manager that keeps other processes from settling their limits at the same time.

        The caller reads the free memory and reserves memory within the context. Yields `promise`.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self._folder, LOCK_S))
            except (TimeoutError, OSError) as error:
                logger.warning(
                    "Could not lock the memory reservations; settling memory limits without the lock: %s", error
                )
            yield self.promise

    def promise(self, num_bytes: int) -> None:
        """Reserves bytes that this process will map.

        The reservation replaces an earlier reservation that is not mapped yet.
        """
        self._own()
        self._ahead = num_bytes
        self._write()

    def map(self, memory: mmap.mmap, address: int) -> None:
        """Reserves a mapping of this process for as long as the mapping exists."""
        self._own()
        num_bytes = len(memory)
        self._ahead = max(0, self._ahead - num_bytes)
        self._mapped[address] = num_bytes
        self._write()
        weakref.finalize(memory, self._unmap, os.getpid(), address).atexit = False

    def untouched(self) -> int:
        """Returns the number of bytes that all processes have reserved but that are not in use yet."""
        return sum(map(self._untouched_of, self._folder.glob(f"{PREFIX}*")))

    def _unmap(self, pid: int, address: int) -> None:
        if pid == os.getpid():
            self._mapped.pop(address)
            self._write()

    def _own(self) -> None:
        """Drops the parent process's reservations if this process is a forked child."""
        if self._pid != os.getpid():
            self._pid, self._file, self._mapped, self._ahead = os.getpid(), None, {}, 0
            self._turn = threading.Lock()

    def _write(self) -> None:
        """Updates the file; if another call is writing the file, that call also writes this change.

        A mapping may end in any thread, or in the garbage collector in the middle of a write. In the latter case, this
        call interrupts the write and must not wait for its end.
        """
        self._stale = True
        while self._stale and self._turn.acquire(timeout=0):
            try:
                self._stale = False
                self._write_once()
            finally:
                self._turn.release()

    def _write_once(self) -> None:
        mapped = self._mapped.copy()  # an atomic copy, because a mapping may end during the loop
        try:
            if self._file is None:
                path = self._folder / f"{PREFIX}{self._pid}.{secrets.token_hex(4)}"
                self._file = path.open("w")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = json.dumps({"pid": self._pid, "of": _names(), "ahead": self._ahead, "mapped": [*mapped.items()]})
            self._file.seek(0)
            # the newline marks the end of the text for readers, because the rest of a longer earlier text may follow
            self._file.write(text + "\n")
            self._file.truncate()
            self._file.flush()
        except OSError as error:
            logger.warning(
                "Could not publish this engine's memory reservation, so other engines may over-allocate: %s", error
            )

    def _untouched_of(self, path: Path) -> int:
        try:
            with path.open() as file:
                said: dict[str, Any] = json.loads(file.readline())
                if _is_left(file):
                    path.unlink()
                    return 0
        except (OSError, ValueError):
            return 0  # the process has ended, or is writing its first line
        readable = said["of"] == _names()
        return said["ahead"] + sum(
            num_bytes - (_touched(said["pid"], address, num_bytes) if readable else 0)
            for address, num_bytes in said["mapped"]
        )


PROMISES = MemoryPromises()
"""Reservations of this process."""


def _is_left(file: IO[str]) -> bool:
    """Whether the process that wrote the file has ended."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _names() -> str:
    """Returns the PID namespace of this process; empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _touched(pid: int, address: int, num_bytes: int) -> int:
    """Returns the number of bytes of a mapping that are in use; 0 if unknown."""
    first, last = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    try:
        with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as file:
            file.seek(first * _ENTRY_BYTES)
            entries = file.read((last - first) * _ENTRY_BYTES)
    except OSError:
        return 0
    # entries are little-endian, so the last byte of an entry is its highest
    highest = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return min(num_bytes, len(highest.translate(None, _UNTOUCHED)) * mmap.PAGESIZE)
