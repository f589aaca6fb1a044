"""Detects kills by the kernel's out-of-memory killer, which are visible only in counters and logs of the kernel."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")
ADVICE = "lower kv_cache_memory_bytes or cpu_memory_utilization, or give the node or the container more memory"


class MemoryKills:
    """Counts out-of-memory kills on this machine, of any process, since construction."""

    def __init__(self) -> None:
        self._before = _num_kills()

    def explain(self) -> str:
        """Explanation to append to an error about a process that ended; empty if there were no kills."""
        count = _num_kills() - self._before
        if count <= 0:
            return ""
        return f"; meanwhile the kernel has killed {count} processes because memory was used up: {ADVICE}"


def _num_kills() -> int:
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:  # a sandbox hides the file
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
