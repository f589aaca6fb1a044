"""The memory of a server's processes: how much they have, and a limit that the kernel holds them to."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from wingbeat.cluster.process_tree import descendants

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A cgroup of its own, of version 2 or 1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_second = not (folder / "memory.limit_in_bytes").exists()

    @classmethod
    @contextlib.contextmanager
    def made(cls, name: str) -> Iterator[Self | None]:
        """One that is gone behind the block; None where this machine lets none be made."""
        parent = ROOT / "memory" if (ROOT / "memory" / "memory.limit_in_bytes").exists() else ROOT
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            yield None
            return
        try:
            group = cls(folder)
            yield group if group._limit_file.exists() else None
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()

    @property
    def procs(self) -> Path:
        """Where processes that join write their ids."""
        return self._folder / "cgroup.procs"

    @property
    def _limit_file(self) -> Path:
        return self._folder / ("memory.max" if self._is_second else "memory.limit_in_bytes")

    def limit(self, num_bytes: int) -> None:
        """Hold all of them together to so many bytes, pages of files included as far as they cannot be dropped."""
        self._limit_file.write_text(str(num_bytes))

    def num_kills(self) -> int:
        """Processes that were killed for it."""
        events = self._folder / ("memory.events" if self._is_second else "memory.oom_control")
        fields = dict(line.split() for line in events.read_text().splitlines())
        return int(fields.get("oom_kill", 0))


def memory_by_process(root: int) -> dict[str, int]:
    """By name and id, the proportional set sizes of a process and all below it, in bytes."""
    found = {}
    for pid in (root, *(process.pid for process in descendants(root))):
        folder = Path(f"/proc/{pid}")
        try:
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").split()
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile
        name = command[0] if command and command[0].startswith("ray::") else " ".join(command[-3:])
        sizes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        found[f"{name[-60:]} ({pid})"] = 1024 * sum(sizes)
    return found
