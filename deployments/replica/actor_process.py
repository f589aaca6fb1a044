"""Identifies an actor's process across the cluster, so that the process can be killed from any node.

Ray is imported only inside `kill`, because the drafter's process, which runs without Ray, imports this file too.
"""

import contextlib
import os
import signal
from typing import NamedTuple

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.placement import node_id


class ActorProcess(NamedTuple):
    """A process on any node of the cluster. A pid may be reused, but never together with its start time."""

    node: str
    pid: int
    start: int

    @classmethod
    def own(cls) -> "ActorProcess":
        """Return the process that this method runs in."""
        pid = os.getpid()
        return cls(node_id(), pid, process_start(pid))

    def kill(self) -> None:
        """Send SIGKILL to the process without waiting for its end. SIGKILL is used because a stopped process (SIGSTOP)
        would not read a request to exit. If the process is on another node, a Ray task that reserves no resources runs
        on that node and sends the signal.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.node == node_id():
            kill_here(self.pid, self.start)
            return
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task = ray.remote(kill_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        task.remote(self.pid, self.start)


def kill_here(pid: int, start: int) -> None:
    """Kill the process `pid` of this node if its start time is `start`, that is, if the pid has not been reused."""
    if PeerProcess(pid, start).alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
