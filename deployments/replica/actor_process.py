"""An actor's process, identified across the cluster so that it can be killed on its own node.

Ray is imported only inside `kill`: the drafter's process uses this file and runs without Ray.
"""

import contextlib
import os
import signal
from typing import NamedTuple

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.placement import node_id


class ActorProcess(NamedTuple):
    """Process on any node of the cluster; pid and start time together are never reused."""

    node: str
    pid: int
    start: int

    @classmethod
    def own(cls) -> "ActorProcess":
        """The calling actor's process."""
        pid = os.getpid()
        return cls(node_id(), pid, process_start(pid))

    def kill(self) -> None:
        """Send SIGKILL without waiting. SIGKILL also ends a stopped process, which would not read a request to exit.

        For a process on another node, a Ray task without resources runs there and sends the signal.
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
    """Kill a process of this node if its start time still matches, that is, if the pid has not been reused."""
    if PeerProcess(pid, start).alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
