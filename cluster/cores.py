"""CPU cores for pairs. Without a GPU, verifier and drafter compute in turn, so each pair gets one core of its own.

While the verifier computes, the drafter waits, and vice versa. If each process had a core, the core of the waiting
process would go idle and resume slowly, because an idle core sleeps, and an idle virtual core is given to other
machines. On one shared core the two processes keep the core awake, and the routers can use all other cores. Claims are
file locks, so a dead process holds no claim.
"""

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""OpenMP's settings for waits. With this spin count GNU's library, which torch ships, spins for some tens of
microseconds. The last variable is for the libraries of LLVM and Intel.
"""


def waiting_env() -> dict[str, str]:
    """Environment for processes that share a core: OpenMP threads, torch's included, sleep instead of spinning.

    Threads that spin would keep the other process off the core. OpenMP reads these variables when it is loaded. The
    result leaves out variables that are already set in this process.
    """
    return {name: value for name, value in _WAITING.items() if name not in os.environ}


class CoreClaim:
    """A core that this process has claimed until `release` or until the process ends."""

    def __init__(self, core: int, lock: IO[str]) -> None:
        self.core = core
        self._lock = lock

    def release(self) -> None:
        """Release the core."""
        self._lock.close()


def claim_core(folder: Path | None = None) -> CoreClaim | None:
    """Claim a core that no other pair holds, the highest number first; None if no core is free or the locks fail.

    The core with the lowest number is never claimed, because it is left to processes that belong to no pair.

    Args:
        folder: folder of the lock files, shared by all pairs of a machine.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"wingbeat-cores-{os.getuid()}"
    try:
        return _claim_in(folder)
    except OSError as error:  # a claimed core only improves speed, so an error must not end the start
        logger.warning("no core is claimed, %s cannot hold the locks: %s", folder, error)
        return None


def _claim_in(folder: Path) -> CoreClaim | None:
    folder.mkdir(mode=0o700, exist_ok=True)
    # The folder for temporary files is writable for all users, so another user may have created this folder, with links
    # in place of locks.
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} is a link or belongs to another user")
    for core in sorted(os.sched_getaffinity(0), reverse=True)[:-1]:
        lock = (folder / str(core)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return CoreClaim(core, lock)
    return None


def pin_thread(core: int) -> None:
    """Pin the calling thread to a core; other threads of the process stay unpinned."""
    os.sched_setaffinity(0, {core})
