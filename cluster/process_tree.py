"""The processes below one: what a program that starts Ray must leave nothing of."""

import os
import signal
import time
from collections import defaultdict
from pathlib import Path

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start

POLL_S = 0.05
DEATH_S = 5.0
"""For the kernel to end what was killed: large memory takes a while."""


def descendants(root: int) -> list[PeerProcess]:
    """Every process below `root`, at any depth, that runs now."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        children[int(fields[1])].append(int(path.parent.name))
    found, parents = [], [root]
    while parents:
        pids = children.pop(parents.pop(), [])
        parents += pids
        found += [PeerProcess(pid, process_start(pid)) for pid in pids]
    return found


def end(processes: list[PeerProcess], grace_s: float) -> int:
    """Wait for processes that are about to end, and kill those that have not within `grace_s`; returns how many.

    Those that were killed are gone when this returns, so that what they held can be taken away.
    """
    _wait(processes, grace_s)
    killed = 0
    for process in processes:
        if process.alive():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it ended meanwhile, or never was ours to end
            killed += 1
    _wait(processes, DEATH_S)
    return killed


def _wait(processes: list[PeerProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
