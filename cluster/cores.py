"""CPU cores for pairs: without a GPU, verifier and drafter alternate, so each pair gets one core of its own.

While one of the two computes, the other waits; on two cores the waiting core would go idle and be slow to resume (it
sleeps, and a virtual core is given to others). On one shared core both keep the core awake, and the other cores are
left to the routers. Claims are file locks, so a dead process holds no claim.
"""

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""OpenMP wait settings: GNU's library, which torch ships, spins for some tens of microseconds with this count; the
last variable is for LLVM's and Intel's.
"""


def waiting_env() -> dict[str, str]:
    """Environment for processes that alternate on a core: OpenMP threads, torch's included, sleep instead of spinning.

    Spinning threads would keep the core from the other process. OpenMP reads the variables when it is loaded; variables
    that are already set are left out.
    """
    return {name: value for name, value in _WAITING.items() if name not in os.environ}


class CoreClaim:
    """A core claimed by this process until `release` or its end."""

    def __init__(self, core: int, lock: IO[str]) -> None:
        self.core = core
        self._lock = lock

    def release(self) -> None:
        """Release the core."""
        self._lock.close()


def claim_core(folder: Path | None = None) -> CoreClaim | None:
    """Claim a core that no other pair holds, highest number first; None if none is free or lockable.

    One core always stays unclaimed, for everything that is not a pair.

    Args:
        folder: folder of the lock files, shared by all pairs of a machine.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"wingbeat-cores-{os.getuid()}"
    try:
        return _claim_in(folder)
    except OSError as error:  # a shared core only improves speed, so no error may propagate
        logger.warning("no core is claimed, %s cannot hold the locks: %s", folder, error)
        return None


def _claim_in(folder: Path) -> CoreClaim | None:
    folder.mkdir(mode=0o700, exist_ok=True)
    # In a folder that everybody may write to, another user may have created it, with links in place of locks.
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
