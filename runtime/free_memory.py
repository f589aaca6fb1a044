"""Free and total memory of this machine, or of the container that this process runs in."""

import os
from pathlib import Path

from wingbeat.runtime.parts import hooks

SHM_DIR = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Returns bytes that can be allocated without swapping, within the container's limit; None if unknown.

    Memory that engines have reserved for KV counts as taken, even before the engines use that memory.
    """
    available = _of_machine("MemAvailable:")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        room = max(0, limit - used)
        available = room if available is None else min(room, available)
    promised = sum(num_bytes() for num_bytes in hooks("promised_bytes"))
    return None if available is None else max(0, available - promised)


def total_memory() -> int | None:
    """Returns bytes of this machine, or of the container's limit; None if unknown."""
    limit, machine = _number(_CGROUP / "memory.max"), _of_machine("MemTotal:")
    return machine if limit is None else limit if machine is None else min(limit, machine)


def free_shared_memory() -> int:
    """Returns the free bytes of /dev/shm, limited to the free memory, because files in /dev/shm are in memory."""
    stats = os.statvfs(SHM_DIR)
    free, memory = stats.f_bavail * stats.f_frsize, free_memory()
    return free if memory is None else min(free, memory)


def _of_machine(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
