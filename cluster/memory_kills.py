"""Whether the kernel has ended processes because memory was used up: it tells nobody but its own log."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")
ADVICE = "lower kv_cache_memory_bytes or cpu_memory_utilization, or give the node or the container more memory"


class MemoryKills:
    """Counts from when it was made; kills on the same machine, of whichever process."""

    def __init__(self) -> None:
        self._before = _num_kills()

    def explain(self) -> str:
        """What an unexplained end of a process may have to do with it; empty where nothing."""
        count = _num_kills() - self._before
        if count <= 0:
            return ""
        return f"; meanwhile the kernel has killed {count} processes because memory was used up: {ADVICE}"


def _num_kills() -> int:
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:  # not told in this sandbox
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
