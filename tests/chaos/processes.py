"""The processes of one cluster. A stage has a PID namespace of its own: there are no others that could be met."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

OWN_DESCRIPTORS = ("/memfd:wingbeat-link", "anon_inode:[pidfd]", "/dev/shm/wingbeat.")
"""Prefixes of Wingbeat's own descriptors: a surviving process must have as many of them after a failure as before."""
NOISE = 12
"""Descriptors that Ray may have opened meanwhile in a process that goes on: its connections come and go."""

APP = "chaos"
KINDS = {
    "router": f"ray::ServeReplica:{APP}:Router",
    "verifier": f"ray::ServeReplica:{APP}:Verifier",
    "pool": f"ray::ServeReplica:{APP}:DrafterPool",
    "drafter": "ray::DrafterActor",
    "rank": "ray::RankActor",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
}
"""By kind, how the name begins that Ray gives the process."""
MODULES = {
    "engine": "wingbeat.deployments.replica.engine.engine_process",
    "forked": "wingbeat.cluster.fork_server",
}
"""By kind, the module that processes run which are not Ray's: one such process forks the other."""


class Found(NamedTuple):
    """A process of the application."""

    kind: str
    pid: int
    stopped: bool
    descriptors: Counter
    """By kind of descriptor, those of `OWN_DESCRIPTORS`; under "all" their number."""


def found() -> list[Found]:
    """Every process of a kind that the suite knows."""
    all_of_them = (_look(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
    return [one for one in all_of_them if one is not None]


def pids(kind: str) -> list[int]:
    """Process ids of a kind, the oldest first."""
    return sorted(one.pid for one in found() if one.kind == kind)


def exists(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    return _state(pid) not in (None, "Z", "X")


def parent(pid: int) -> int:
    """Parent's id of a running process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def send(pid: int, number: signal.Signals) -> None:
    """A signal; the process may have ended by itself."""
    os.kill(pid, number)


def counts(there: list[Found]) -> Counter:
    """Processes of each kind."""
    return Counter(one.kind for one in there)


def leaks(before: list[Found], now: list[Found]) -> list[str]:
    """Descriptions of processes and descriptors in excess of `before`; replaced processes are no leaks."""
    were, are = counts(before), counts(now)
    problems = [f"{are[kind]} of {kind}, not {were[kind]}" for kind in (*KINDS, *MODULES) if are[kind] != were[kind]]
    problems += [f"{one.kind} {one.pid} is stopped" for one in now if one.stopped]
    earlier = {one.pid: one for one in before}
    for one in now:
        if (known := earlier.get(one.pid)) is None:
            continue
        for name in OWN_DESCRIPTORS:
            if one.descriptors[name] > known.descriptors[name]:
                problems.append(f"{one.kind} has {one.descriptors[name]} of {name}, not {known.descriptors[name]}")
        if one.descriptors["all"] > known.descriptors["all"] + NOISE:
            problems.append(f"{one.kind} has {one.descriptors['all']} descriptors, not {known.descriptors['all']}")
    return problems


def _look(pid: int) -> Found | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        kind = next((kind for kind, name in KINDS.items() if command.startswith(name)), None)
        if kind is None:
            kind = next((kind for kind, module in MODULES.items() if f"-m {module} " in command), None)
        state = _state(pid)
        if kind is None or state in (None, "Z", "X"):
            return None
        return Found(kind, pid, state == "T", _descriptors(pid))
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return None


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _descriptors(pid: int) -> Counter:
    counts: Counter = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(path.readlink())
        except (FileNotFoundError, ProcessLookupError):
            continue
        counts["all"] += 1
        counts.update(name for name in OWN_DESCRIPTORS if target.startswith(name))
    return counts
