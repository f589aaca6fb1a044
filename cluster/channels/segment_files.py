"""Files of segments in /dev/shm: names, owners, and removal of segments whose owner is dead.

Does not use torch, because the process that starts an application and removes its segments has not loaded torch.
"""

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from wingbeat.cluster.channels.doorbell import PeerProcess
from wingbeat.cluster.channels.header import MAGIC, NUM_WORDS, ChannelError, Word

logger = logging.getLogger(__name__)
SHM_DIR = Path("/dev/shm")
PREFIX = "wingbeat."
UNFINISHED = ".unfinished"
LOCK_S, LOCK_POLL_S = 10.0, 0.005
"""Longest wait for the lock and the interval of attempts, in seconds. A holder only lists and unlinks a few files."""
JSON_START = 8 * NUM_WORDS
"""Offset of the JSON in a segment's header, in bytes. The words come before the JSON."""


def close_segment(words: memoryview, path: Path, pid: int) -> None:
    """Mark the channel as closed and unlink its file.

    Does nothing in a forked child, which has inherited the finalizer.
    """
    if os.getpid() == pid:
        words[Word.CLOSED] = 1
        with directory_lock():  # the unlink is safe even without the lock, because this process owns the file
            path.unlink(missing_ok=True)


def remove_stale_segments() -> int:
    """Unlink segments of dead verifiers, and no other files. Returns the number of these segments."""
    removed = 0
    with directory_lock() as held:
        for path in SHM_DIR.glob(f"{PREFIX}*") if held else ():
            owner = _owner(path)
            if owner is None or owner.alive():
                continue
            with contextlib.suppress(FileNotFoundError, PermissionError):  # already removed, or another user's
                path.unlink()
                removed += 1
    return removed


def segment_path(name: str) -> Path:
    """Path of the segment `name`. Raises ChannelError if the name is not a plain file name."""
    if not name or "/" in name or "\0" in name or len(name) > 150:
        raise ChannelError(f"channel name {name!r} must be a file name of 1..150 characters")
    return SHM_DIR / f"{PREFIX}{name}"


@contextlib.contextmanager
def directory_lock() -> Iterator[bool]:
    """Context that locks the segment directory. Without the lock, a process could create a new segment under a stale
    name just before another process unlinks that name.

    Yields whether this process holds the lock. False means that another process, which may be stopped, has held the
    lock for longer than LOCK_S.
    """
    fd = os.open(SHM_DIR, os.O_RDONLY | os.O_CLOEXEC)
    try:
        held = _locked(fd)
        if not held:
            logger.warning("Another process has held the lock of %s for %.0f s: continuing without it", SHM_DIR, LOCK_S)
        yield held
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_S)


def _owner(path: Path) -> PeerProcess | None:
    """The process that created a segment; None if the process is unknown or another user owns the file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        # Any user may create files in /dev/shm, and opening a named pipe there would block for ever.
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            return None
    if path.name.endswith(UNFINISHED):
        pid, start = path.name.removesuffix(UNFINISHED).split(".")[-2:]
        return PeerProcess(int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else None
    try:
        with path.open("rb") as file:
            words = memoryview(file.read(JSON_START).ljust(JSON_START, b"\0")).cast("q")
    except OSError:
        return None
    if words[Word.MAGIC] != MAGIC:
        return None
    return PeerProcess(words[Word.VERIFIER_PID], words[Word.VERIFIER_START])
