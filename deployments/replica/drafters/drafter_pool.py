"""The drafters that all verifiers of an application share: keeps them, and says which of them has the fewest verifiers.

A Serve deployment of one replica that needs no resources of its own, so that an application is there whether its
drafters are or not. They are Ray actors, placed by themselves, and end with this replica.
"""

import asyncio
from functools import partial
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.drafters.pool_member import PoolMember
from wingbeat.deployments.replica.drafters.shared_drafter import Candidate, SharedDrafter

BALANCE_S = 10.0
"""Between two looks at whether drafters have unequal numbers of verifiers, as after one of them has come back."""
END_S = 5.0
"""For tasks that were cancelled to end."""
UNEQUAL = 2
"""Verifiers that one drafter has beyond another before it lets one go: that verifier's contexts are replayed."""


class DrafterPool:
    """Serve makes it; verifiers call it."""

    async def __init__(self, config: AppConfig) -> None:
        show_log()
        make = partial(PoolMember, start=partial(SharedDrafter.start, config))
        self._members = [
            make(number, complaint_s=config.drafter_timeout_s, back_off_s=config.drafter_back_off_s)
            for number in range(config.drafters.num)
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(member.run()) for member in self._members]
        self._tasks.append(loop.create_task(self._balance()))

    async def candidates(self, node: str) -> list[Candidate]:
        """Drafters that a verifier on this node may ask for a place, the least loaded first; none where none is there.

        Whoever asks is taken to go to the first one, so that several that ask at once are spread.
        """
        found = by_load(self._members, node)
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
            for member in overloaded(self._members):
                member.drafter.release_newest()

    async def __del__(self) -> None:
        """Serve's hook at the end of the replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=END_S)


def by_load(members: list[PoolMember], node: str) -> list[PoolMember]:
    """Members that a verifier on a node can reach, the one with the fewest verifiers first."""
    there = [member for member in members if member.answers and reaches(member.status.process.node, node)]
    return sorted(there, key=lambda member: member.num_verifiers)


def reaches(drafter_node: str, verifier_node: str) -> bool:
    """Whether there is a channel between the two: it is memory of one node."""
    return drafter_node == verifier_node


def overloaded(members: list[PoolMember]) -> list[PoolMember]:
    """On each node, the member that is to let one verifier go, where another one there has far fewer."""
    found = []
    for node in {member.status.process.node for member in members if member.answers}:
        loaded = by_load(members, node)
        if loaded[-1].num_verifiers - loaded[0].num_verifiers >= UNEQUAL:
            found.append(loaded[-1])
    return found
