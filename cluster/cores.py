"""CPU cores for pairs: without a GPU verifier and drafter take turns, so each pair gets one core of its own.

A round alternates strictly: whoever waits leaves its core idle, and an idle core is slow to come back (it sleeps, and a
virtual one is given away). On one core the two keep it awake for each other, and the rest is left to the routers.
Claims are file locks, so a dead process claims nothing.
"""

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""GNU's library, which torch brings, spins for some tens of microseconds by that number; others' have the last one."""


def waiting_env() -> dict[str, str]:
    """For processes that take turns: threads of OpenMP, torch's among them, sleep where they would spin for long.

    They would keep the core from the process whose turn it is. Read when a process loads OpenMP's library; what the
    environment says already is left.
    """
    return {name: value for name, value in _WAITING.items() if name not in os.environ}


class CoreClaim:
    """One core claimed by this process until `release` or its end."""

    def __init__(self, core: int, lock: IO[str]) -> None:
        self.core = core
        self._lock = lock

    def release(self) -> None:
        """Give the core back."""
        self._lock.close()


def claim_core(folder: Path | None = None) -> CoreClaim | None:
    """Claim a core that no other pair holds, the last ones first; None where there is none to spare or to lock.

    One core always stays unclaimed, for everything that is not a pair.

    Args:
        folder: of the lock files; shared by all pairs of a machine.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"wingbeat-cores-{os.getuid()}"
    try:
        return _claim_in(folder)
    except OSError as error:  # a shared core is for speed alone: nothing must fail for want of it
        logger.warning("no core is claimed, %s cannot hold the locks: %s", folder, error)
        return None


def _claim_in(folder: Path) -> CoreClaim | None:
    folder.mkdir(mode=0o700, exist_ok=True)
    # In a folder that everybody may write to, another user can have made it, with links in place of locks.
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
    """Keep the calling thread on a core; other threads of the process go where they like."""
    os.sched_setaffinity(0, {core})
