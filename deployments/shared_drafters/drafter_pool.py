"""The drafters that all verifiers of an application share: keeps them, and says which of them has the fewest verifiers.

A Serve deployment of one replica that needs no resources of its own, so that an application is there whether its
drafters are or not. They are Ray actors, placed by themselves, and end with this replica.
"""

import asyncio
from functools import partial
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from wingbeat.deployments.app import HEALTH_CHECK_PERIOD_S, SERVE_ENV, START_ATTEMPTS, UNLIMITED
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import level_environment, show_log
from wingbeat.deployments.shared_drafters.pool_member import PoolMember
from wingbeat.deployments.shared_drafters.shared_drafter import Candidate, SharedDrafter

BALANCE_S = 10.0
"""Between two looks at whether drafters have unequal numbers of verifiers, as after one of them has come back."""
END_S = 5.0
"""For tasks that were cancelled to end."""
UNEQUAL = 2
"""Verifiers that one drafter has beyond another before it lets one go: that verifier's contexts are replayed."""
FAR = 1
"""Verifiers that a drafter of another node must have less than one of the verifier's own, to be asked before it. Below
`UNEQUAL`, so that a verifier that was let go does not come back."""


class DrafterPool:
    """Serve makes it; verifiers call it."""

    async def __init__(self, config: AppConfig) -> None:
        show_log()
        self._spans_nodes = config.channel == "remote"
        make = partial(PoolMember, start=partial(SharedDrafter.start, config))
        self._members = [
            make(number, complaint_s=config.drafter_timeout_s, back_off_s=config.drafter_back_off_s)
            for number in range(config.drafters.num)
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(member.run()) for member in self._members]
        self._tasks.append(loop.create_task(self._balance()))

    async def candidates(self, node: str) -> list[Candidate]:
        """Drafters that a verifier on this node may ask for a place, as `by_load` sorts them; none where none is there.

        Whoever asks is taken to go to the first one, so that several that ask at once are spread.
        """
        found = by_load(self._members, node, self._spans_nodes)
        if found:
            found[0].num_promised += 1
        return [Candidate(member.number, member.drafter) for member in found]

    async def left(self, number: int) -> None:
        """A verifier has no more use for its drafter, maybe because that is silent."""
        self._members[number].blame()

    async def stats(self) -> list[dict[str, Any]]:
        """By drafter: its process, the channels it serves, and how often one was started."""
        return [
            {
                "pid": 0 if member.status is None else member.status.process.pid,
                "channels": [] if member.status is None else list(member.status.channels),
                "num_started": member.num_started,
            }
            for member in self._members
        ]

    async def _balance(self) -> None:
        while True:
            await asyncio.sleep(BALANCE_S)
            for member in overloaded(self._members, self._spans_nodes):
                member.drafter.release_newest()

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=END_S)


def deployment(mark: str) -> serve.Deployment:
    """Deployment of the pool of one model, whose deployments' names end by a mark."""
    return serve.deployment(
        DrafterPool,
        name=f"DrafterPool{mark}",
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": SERVE_ENV | level_environment()}},
        max_ongoing_requests=UNLIMITED,
        max_constructor_retry_count=START_ATTEMPTS,
        logging_config=LoggingConfig(enable_access_log=False),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        num_replicas=1,
    )


def by_load(members: list[PoolMember], node: str, spans_nodes: bool = False) -> list[PoolMember]:
    """Members that a verifier on a node can reach, the nearest with the fewest verifiers first.

    Args:
        spans_nodes: whether channels reach other nodes, as those in memory do not.
    """

    def cost(member: PoolMember) -> tuple[int, int]:
        far = 0 if member.status.process.node == node else FAR
        return member.num_verifiers + far, member.num_verifiers

    there = [member for member in members if member.answers and (spans_nodes or member.status.process.node == node)]
    return sorted(there, key=cost)


def overloaded(members: list[PoolMember], spans_nodes: bool = False) -> list[PoolMember]:
    """On each node, or of all nodes where channels span them, the member that is to let one verifier go, where another
    one has far fewer."""
    there, found = [member for member in members if member.answers], []
    nodes = {member.status.process.node for member in there}
    groups = [there] if spans_nodes else [[m for m in there if m.status.process.node == node] for node in nodes]
    for group in filter(None, groups):
        loaded = sorted(group, key=lambda member: member.num_verifiers)
        if loaded[-1].num_verifiers - loaded[0].num_verifiers >= UNEQUAL:
            found.append(loaded[-1])
    return found
