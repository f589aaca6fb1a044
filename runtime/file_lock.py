"""A lock between processes, which the kernel releases when the holding process ends for any reason."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S, NAP_S = 30.0, 0.005
"""Timeout and polling interval in seconds. The timeout is ample, because holders of a lock only write or remove files.
"""


@contextmanager
def locked(path: Path, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Holds the lock of a file or folder within the block; creates a missing file and its folder.

    Raises:
        TimeoutError: another process held the lock for `limit_s` seconds. With 0, the lock is tried once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    flags = os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process holds {path}") from None
                time.sleep(NAP_S)
        yield
    finally:
        os.close(fd)
