"""Finds and ends descendant processes, because a program that starts Ray must leave none of its processes behind."""

import contextlib
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start

RAYS_PROGRAMS = frozenset({"gcs_server", "raylet"})
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


def writers(folder: Path) -> list[PeerProcess]:
    """Python processes of this environment, and Ray's programs, that have a file below `folder` open for writing.

    Other programs are not included, such as a pager or an editor in which a user has opened a log.
    """
    ours = Path(sys.executable).resolve()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            program = (path / "exe").readlink()
            if (program == ours or program.name in RAYS_PROGRAMS) and _writes_below(path, folder):
                found.append(PeerProcess(int(path.name), process_start(int(path.name))))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process ended meanwhile, or is another user's
    return [process for process in found if process.pid != os.getpid()]


def _writes_below(process: Path, folder: Path) -> bool:
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process has closed the file meanwhile
            if not fd.readlink().is_relative_to(folder):
                continue
            lines = (process / "fdinfo" / fd.name).read_text().splitlines()
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
            if flags & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


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
