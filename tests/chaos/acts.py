"""Acts of the adversary, by name. A new victim is a line of `VICTIMS`, and the act's name in a scenario."""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos import processes

if TYPE_CHECKING:
    from tests.chaos.world import World

PAUSE_S = 4.0
"""Shorter than any health check's patience."""
LONG_PAUSE_S = 10.0
"""Less than any limit at which a process is taken for stuck, but that of a drafter."""
LEFT_BYTES = 2**18
"""Bytes of shared memory that stay free: less than any channel needs."""
FULL_S = 6.0
PIDFD_GETFD = 438
"""The system call's number, on every architecture."""
BURST = 6
"""Clients more than there are, for so long as it takes to preempt requests."""

VICTIMS: dict[str, Callable[["World"], int]] = {
    "drafter": lambda world: world.engine("drafter_pid"),
    "engine": lambda world: world.engine("engine_pid"),
    "verifier": lambda world: world.engine("pid"),
    "rank": lambda world: world.engine("rank_pids")[0],
    "router": lambda world: processes.pids("router")[0],
    "proxy": lambda world: processes.pids("proxy")[0],
    "controller": lambda world: processes.pids("controller")[0],
    "pool": lambda world: processes.pids("pool")[0],
    "drafter's actor": lambda world: processes.pids("drafter")[0],
    "fork server": lambda world: processes.parent(world.engine("drafter_pid")),
}


class Act(NamedTuple):
    """A fault that is provoked."""

    do: Callable[["World"], Callable[[], bool]]
    """Does it, and returns the condition from which on it has been noticed."""
    breaks_connections: bool = False
    """Clients must send again what was under way on a connection that broke."""


def kill(victim: str) -> Callable[["World"], Callable[[], bool]]:
    """The process ends without a word."""

    def do(world: "World") -> Callable[[], bool]:
        pid = VICTIMS[victim](world)
        processes.send(pid, signal.SIGKILL)
        return lambda: not processes.exists(pid)

    return do


def stop(victim: str) -> Callable[["World"], Callable[[], bool]]:
    """The process does nothing any more; who depends on it has to end it."""

    def do(world: "World") -> Callable[[], bool]:
        pid = VICTIMS[victim](world)
        processes.send(pid, signal.SIGSTOP)
        return lambda: not processes.exists(pid)

    return do


def pause(victim: str, seconds: float = PAUSE_S) -> Callable[["World"], Callable[[], bool]]:
    """The process gets no processor for a while, as on a machine that swaps."""

    def do(world: "World") -> Callable[[], bool]:
        pid = VICTIMS[victim](world)
        processes.send(pid, signal.SIGSTOP)
        time.sleep(seconds)
        if processes.exists(pid):
            processes.send(pid, signal.SIGCONT)
        return lambda: True

    return do


def sleep_through(victim: str) -> Callable[["World"], Callable[[], bool]]:
    """As `pause`, for long; it is the same process afterwards, as nobody may have taken it for dead."""

    def do(world: "World") -> Callable[[], bool]:
        pid = VICTIMS[victim](world)
        processes.send(pid, signal.SIGSTOP)
        time.sleep(LONG_PAUSE_S)
        lived = processes.exists(pid)
        if lived:
            processes.send(pid, signal.SIGCONT)
        return lambda: lived and processes.exists(pid)

    return do


def exhaust_kv(world: "World") -> Callable[[], bool]:
    """More long requests than there are KV blocks for."""
    preempted = world.num_preemptions()
    world.begin_burst(BURST)
    return lambda: world.num_preemptions() > preempted


def fill_shared_memory(world: "World") -> Callable[[], bool]:
    """/dev/shm has no room for another channel when an engine has to be replaced."""
    file = Path("/dev/shm/filling")
    free = os.statvfs("/dev/shm")
    with file.open("wb") as filling:
        os.posix_fallocate(filling.fileno(), 0, free.f_bavail * free.f_frsize - LEFT_BYTES)
    replaced = kill("engine")(world)
    time.sleep(FULL_S)
    file.unlink()
    return replaced


def cut_channel(world: "World") -> Callable[[], bool]:
    """The connection between an engine and its drafter on another node ends."""
    incarnation = world.engine("drafter_incarnation")
    assert cut_connections(world.engine("drafter_pid"), world.engine("engine_pid")) > 0, "there is no such connection"
    return lambda: world.engine("drafter_incarnation") > incarnation


def remove_drafters_node(world: "World") -> Callable[[], bool]:
    """The raylet of a drafter's node ends, and everything on it; another node comes."""
    node_pids = world.replace_node("drafters")
    return lambda: not any(map(processes.exists, node_pids))


def lose_shared_drafters_node(silently: bool) -> Callable[["World"], Callable[[], bool]]:
    """A node with one of the drafters that verifiers share goes, or stands still first as one whose network is gone;
    another node comes when the verifiers draft again."""

    def do(world: "World") -> Callable[[], bool]:
        node_pids = world.lose_shared_drafter(silently)
        return lambda: not any(map(processes.exists, node_pids))

    return do


def drain_verifiers_node(world: "World") -> Callable[[], bool]:
    """Ray is told that a node with a verifier is about to go, as clouds tell of their machines; another node is there,
    and the old one goes when its replicas have."""
    node_pids = world.drain_node("verifiers")
    return lambda: not any(map(processes.exists, node_pids))


def remove_verifiers_node(world: "World") -> Callable[[], bool]:
    """The raylet of a node with a verifier ends, and everything on it, which may be a router; another node comes."""
    node_pids = world.replace_node("verifiers")
    return lambda: not any(map(processes.exists, node_pids))


ACTS: dict[str, Act] = {
    **{f"kill {victim}": Act(kill(victim)) for victim in VICTIMS},
    **{f"stop {victim}": Act(stop(victim)) for victim in VICTIMS},
    **{f"pause {victim}": Act(pause(victim)) for victim in VICTIMS},
    **{f"pause {victim} long": Act(pause(victim, LONG_PAUSE_S)) for victim in VICTIMS},
    **{f"pause {victim} long": Act(sleep_through(victim)) for victim in ("engine", "verifier", "fork server")},
    "delay drafter": Act(pause("drafter", 0.5)),
    "exhaust KV": Act(exhaust_kv),
    "fill shared memory": Act(fill_shared_memory),
    "cut channel": Act(cut_channel),
    "remove drafter's node": Act(remove_drafters_node),
    "remove shared drafter's node": Act(lose_shared_drafters_node(silently=False)),
    "freeze shared drafter's node": Act(lose_shared_drafters_node(silently=True)),
    "remove verifier's node": Act(remove_verifiers_node),
    "drain verifier's node": Act(drain_verifiers_node),
}
# Proxies of all nodes listen at one port here, and that of a node that goes is one of them.
OF_NODES = ("remove verifier's node", "drain verifier's node")
for name in ("kill router", "stop router", "kill proxy", "stop proxy", *OF_NODES):
    ACTS[name] = ACTS[name]._replace(breaks_connections=True)


def cut_connections(pid: int, peer: int) -> int:
    """Shut down every TCP connection of a process whose other end is `peer`'s; returns how many."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    peers = _ports(peer)
    count = 0
    try:
        for number in _sockets(pid):
            fd = libc.syscall(PIDFD_GETFD, process, number, 0)
            if fd < 0:
                continue
            with socket.socket(fileno=fd) as held:
                if held.family == socket.AF_INET and held.type == socket.SOCK_STREAM and _peer_port(held) in peers:
                    held.shutdown(socket.SHUT_RDWR)
                    count += 1
    finally:
        os.close(process)
    return count


def _sockets(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if str(path.readlink()).startswith("socket:")]


def _peer_port(held: socket.socket) -> int | None:
    try:
        return held.getpeername()[1]
    except OSError:
        return None


def _ports(pid: int) -> set[int]:
    """TCP ports of a process on this machine."""
    inodes = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in inodes}
