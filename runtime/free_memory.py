"""What this machine, or the container this process is in, has to give: memory, and the shared part of it."""

import os
from pathlib import Path

from wingbeat.runtime.memory_promises import PROMISES

SHM_DIR = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that can be taken without swapping, within the container's limit; None where the system does not say.

    Memory that engines have set aside for KV is taken, whether they have used it or not.
    """
    available = _of_machine("MemAvailable:")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        room = max(0, limit - used)
        available = room if available is None else min(room, available)
    return None if available is None else max(0, available - PROMISES.untouched())


def total_memory() -> int | None:
    """Bytes of this machine, or of the container's limit; None where the system does not say."""
    limit, machine = _number(_CGROUP / "memory.max"), _of_machine("MemTotal:")
    return machine if limit is None else limit if machine is None else min(limit, machine)


def free_shared_memory() -> int:
    """Bytes of /dev/shm that can be taken: its files lie in memory, so no more than that has."""
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
