"""One drafter that verifiers share: how its pool and they reach it, and what they tell each other of it."""

import asyncio
from typing import NamedTuple, Self

import ray
from ray.actor import ActorHandle

from wingbeat.cluster.placement import shared_drafter_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor, renewed
from wingbeat.deployments.replica.drafters.drafter_messages import DrafterStatus

ANSWER_S = 60.0
"""For a place: the first verifier of a drafter on a GPU waits for its kernels and graphs."""


class Placed(NamedTuple):
    """The answer to a verifier that wants to share a drafter."""

    pid: int
    refusal: str | None = None
    """Why it has no place."""


class SharedDrafterActor(DrafterActor):
    """The actor of a drafter that verifiers share."""

    serve = "wingbeat.deployments.shared_drafters.shared_calls:serve"


class SharedDrafter:
    """An actor, as a value that travels between processes. It ends with the process that started it."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    @classmethod
    def start(cls, config: AppConfig) -> Self:
        """Have one placed and started; says nothing of whether there is room for it in the cluster."""
        options = shared_drafter_options(config.drafter_share())
        return cls(ray.remote(SharedDrafterActor).options(max_restarts=0, **options).remote(config))

    async def status(self) -> DrafterStatus:
        """What it says of itself, once it has loaded; raises where it is gone."""
        return await self._actor.status.remote()

    async def attach(self, channel_name: str, incarnation: int, terms: bytes | None) -> Placed:
        """Have it serve one more channel.

        Raises:
            TimeoutError: it does not answer.
            Exception: it is gone, or cannot serve this verifier.
        """
        async with asyncio.timeout(ANSWER_S):
            return await self._actor.call.remote("attach_shared", channel_name, incarnation, terms)

    def detach(self, channel_name: str) -> None:
        """Have it serve a channel no more, without waiting."""
        self._actor.call.remote("detach", channel_name)

    def release_newest(self) -> None:
        """Have it let go of the verifier that came last, without waiting."""
        self._actor.call.remote("release_newest")

    async def renew(self) -> bool:
        """Begin another process in its actor, which serves nobody yet; False where that is gone too."""
        return await renewed(self._actor)

    def kill(self, process: ActorProcess | None) -> None:
        """End it without waiting: through Ray, and by signal once its process is known."""
        ray.kill(self._actor, no_restart=True)
        if process is not None:
            process.kill()


class Candidate(NamedTuple):
    """A drafter with which a verifier may try to get a place."""

    number: int
    """Of the member of the pool."""
    drafter: SharedDrafter
