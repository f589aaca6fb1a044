"""Handle of a shared drafter for its pool and its verifiers, and the messages between them."""

import asyncio
from typing import NamedTuple, Self

import ray
from ray.actor import ActorHandle

from wingbeat.cluster.placement import actor_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor, renewed
from wingbeat.deployments.replica.drafters.drafter_messages import DrafterStatus

ANSWER_S = 60.0
"""Maximum seconds to wait for the answer to a request for slots. The limit is long because a drafter on a GPU compiles
kernels and captures graphs for its first verifier.
"""


class Placed(NamedTuple):
    """Answer to a verifier that requests slots."""

    pid: int
    refusal: str | None = None
    """Why the verifier gets no slots; None if the verifier has got slots."""


class SharedDrafterActor(DrafterActor):
    """Ray actor of a shared drafter."""

    serve = "wingbeat.deployments.shared_drafters.shared_calls:serve"


class SharedDrafter:
    """Handle of a drafter's actor; the handle can be sent between processes. The actor ends with the process that
    started it.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    @classmethod
    def start(cls, config: AppConfig) -> Self:
        """Start an actor and return its handle at once, before Ray has placed the actor."""
        options = actor_options(config.drafter_share(), "SPREAD")
        return cls(ray.remote(SharedDrafterActor).options(max_restarts=0, **options).remote(config))

    async def status(self) -> DrafterStatus:
        """Wait until the drafter has loaded, then return its status; raises if the actor is gone."""
        return await self._actor.status.remote()

    async def attach(self, channel_name: str, incarnation: int, terms: bytes | None) -> Placed:
        """Attach the drafter to one more channel.

        Args:
            terms: pickled `DrafterTerms`, or None.

        Raises:
            TimeoutError: the actor has not answered within `ANSWER_S`.
            Exception: the drafter is gone, or cannot serve this verifier.
        """
        async with asyncio.timeout(ANSWER_S):
            return await self._actor.call.remote("attach_shared", channel_name, incarnation, terms)

    def detach(self, channel_name: str) -> None:
        """Detach the drafter from a channel, without waiting for the result."""
        self._actor.call.remote("detach", channel_name)

    def release_newest(self) -> None:
        """Have the drafter detach the verifier that attached last, without waiting for the result."""
        self._actor.call.remote("release_newest")

    async def renew(self) -> bool:
        """Start a new process in the same actor; the new process serves no channel yet. Returns False if the actor is
        gone or stuck.
        """
        return await renewed(self._actor)

    def kill(self, process: ActorProcess | None) -> None:
        """Kill the drafter without waiting for its end. The drafter is killed through Ray, and also by a signal if its
        process is known.
        """
        ray.kill(self._actor, no_restart=True)
        if process is not None:
            process.kill()


class Candidate(NamedTuple):
    """A drafter from which a verifier may request slots."""

    number: int
    """Index, in the pool, of the `PoolMember` that keeps the drafter running."""
    drafter: SharedDrafter
