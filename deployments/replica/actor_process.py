"""The process of an actor, named so that it can be told from all others of a cluster and ended on its own node.

Ray is imported only where it is called: what a drafter does runs without it, too.
"""

import contextlib
import os
import signal
from typing import NamedTuple

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.placement import node_id


class ActorProcess(NamedTuple):
    """Of some node: its id and start time name it for good."""

    node: str
    pid: int
    start: int

    @classmethod
    def own(cls) -> "ActorProcess":
        """The calling actor's."""
        pid = os.getpid()
        return cls(node_id(), pid, process_start(pid))

    def kill(self) -> None:
        """End it by signal, without waiting: a stopped process reads no request to exit.

        On another node a task of Ray's does that, which takes no resources.
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
    """End a process of this node, if it still is the one that started then."""
    if PeerProcess(pid, start).alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
