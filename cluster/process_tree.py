"""Finds and ends descendant processes, because a program that starts Ray must leave none of its processes behind."""

import os
import signal
import time
from collections import defaultdict
from pathlib import Path

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start

POLL_S = 0.05
DEATH_S = 5.0
"""Seconds for the kernel to end killed processes, which includes freeing their memory."""


def descendants(root: int) -> list[PeerProcess]:
    """All running processes below `root`, at any depth."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process ended meanwhile
        children[int(fields[1])].append(int(path.parent.name))
    found, parents = [], [root]
    while parents:
        pids = children.pop(parents.pop(), [])
        parents += pids
        found += [PeerProcess(pid, process_start(pid)) for pid in pids]
    return found


def end(processes: list[PeerProcess], grace_s: float) -> int:
    """Wait `grace_s` for processes to end, then kill those that still run; return the number of killed processes.

    After the kill the function waits, for at most `DEATH_S` seconds, until the processes are gone, so that their
    resources can be removed.
    """
    _wait(processes, grace_s)
    killed = 0
    for process in processes:
        if process.alive():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # the process ended meanwhile, or another user owns it
            killed += 1
    _wait(processes, DEATH_S)
    return killed


def _wait(processes: list[PeerProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
