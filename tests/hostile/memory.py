"""Resident memory of the server's processes, which are descendants of the one that runs the tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TITLES = ("ProxyActor", "ServeReplica:demo:Router")


def resident_bytes() -> dict[str, int]:
    """By title, of Serve's proxy and of the router."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {}
    for pid, line in titles.items():
        title = next((title for title in TITLES if title in line), None)
        if title is not None and _descends(pid, parents):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[title] = pages * os.sysconf("SC_PAGE_SIZE")
    assert len(found) == len(TITLES), f"found only {sorted(found)}"
    return found


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = parents.get(pid, 0)
    return pid == os.getpid()


@contextmanager
def bounded_growth(most_bytes: int) -> Iterator[None]:
    """Raises AssertionError where a process holds that much more after the block than before it."""
    before = resident_bytes()
    yield
    growth = {title: now - before[title] for title, now in resident_bytes().items()}
    assert max(growth.values()) < most_bytes, f"bytes more than before: {growth}"
