"""Pool of the drafters that all verifiers of an application share, which keeps the drafters running and ranks them by
load.

The pool is a Serve deployment of one replica, which reserves no resources. The application can therefore start even if
its drafters cannot be placed. The drafters are Ray actors; Ray places them separately, and they end with the pool's
replica.
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
"""Seconds between two checks whether drafters have unequal numbers of verifiers, for example because a drafter has been
restarted.
"""
END_S = 5.0
"""Maximum seconds to wait until cancelled tasks have ended."""
UNEQUAL = 2
"""Difference between the numbers of verifiers of two drafters at which the drafter with more verifiers releases a
verifier. The price is that another drafter must prefill the contexts of the released verifier.
"""
FAR = 1
"""Number of verifiers that the ranking adds for a drafter on another node than the verifier. The number is less than
`UNEQUAL`, because otherwise a released verifier would choose the same drafter again.
"""


class DrafterPool:
    """Serve deployment of the pool; verifiers call its methods."""

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
        """Return the drafters from which a verifier on `node` may request slots, in the order of `by_load`; the list
        may be empty.

        The pool assumes that the caller will use the first drafter, and counts the verifier there at once, so that
        concurrent callers are spread.
        """
        found = by_load(self._members, node, self._spans_nodes)
        if found:
            found[0].num_promised += 1
        return [Candidate(member.number, member.drafter) for member in found]

    async def left(self, number: int) -> None:
        """Report that a verifier no longer uses its drafter, possibly because the drafter does not respond."""
        self._members[number].blame()

    async def stats(self) -> list[dict[str, Any]]:
        """Return the figures of each drafter: process id, served channels, and number of starts."""
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
    """Return the Serve deployment of one model's pool; `mark` is the suffix of the names of the model's deployments."""
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
    """Return the members that a verifier on `node` can reach; members that are near and have few verifiers come first.

    Args:
        spans_nodes: whether channels reach other nodes; channels in memory do not.
    """

    def cost(member: PoolMember) -> tuple[int, int]:
        far = 0 if member.status.process.node == node else FAR
        return member.num_verifiers + far, member.num_verifiers

    there = [member for member in members if member.answers and (spans_nodes or member.status.process.node == node)]
    return sorted(there, key=cost)


def overloaded(members: list[PoolMember], spans_nodes: bool = False) -> list[PoolMember]:
    """Return the members that shall release one verifier each, because their verifiers can reach another member that
    has far fewer verifiers.

    There is at most one such member per node, or one in total if channels span nodes.
    """
    there, found = [member for member in members if member.answers], []
    nodes = {member.status.process.node for member in there}
    groups = [there] if spans_nodes else [[m for m in there if m.status.process.node == node] for node in nodes]
    for group in filter(None, groups):
        loaded = sorted(group, key=lambda member: member.num_verifiers)
        if loaded[-1].num_verifiers - loaded[0].num_verifiers >= UNEQUAL:
            found.append(loaded[-1])
    return found
