"""A replica's way to its drafter: an actor in the second bundle of its placement group, on whichever node that lies."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.cluster.placement import drafter_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor, renewed
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.engine.engine_messages import NEEDS_ATTEMPTS
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError

logger = logging.getLogger(__name__)
LATE_S = 10.0
"""For an actor to say that its process has not answered; the engine waits a little longer still."""


class RayDrafter:
    """One drafter actor.

    Args:
        terms: pickled `DrafterTerms`; None where they are not settled.
    """

    def __init__(self, config: AppConfig, core: int | None, terms: bytes | None = None) -> None:
        self._config, self._core = config, core
        self._process: ActorProcess | None = None
        self._actor = self._start(terms)
        self.terms = terms
        """What it was told by its verifier; its successors are told the same."""

    async def needs(self, terms: bytes) -> bytes:
        """What it needs of its verifier, once it is ready; both pickled.

        Raises:
            DrafterStartError: it cannot start; names the cause.
        """
        self.terms = terms
        for _ in range(NEEDS_ATTEMPTS):
            try:
                return await self._answer(self._actor.call.remote("needs", terms))
            except RayError as error:
                raise DrafterStartError(f"the drafter cannot start: {root_cause(error)}") from None
            except TimeoutError as error:
                logger.warning("%s: starting another one", error)
                self.kill()
                self._process, self._actor = None, self._start(terms)
        raise DrafterStartError(f"{NEEDS_ATTEMPTS} drafters have not said what they need of the verifier")

    async def attach(self, channel_name: ChannelName, next_incarnation: Callable[[], int]) -> int:
        """Make it serve a channel, once it is ready; its process id."""
        if self._process is None:
            self._process = (await self._answer(self._actor.status.remote())).process
        return await self._answer(self._actor.call.remote("attach", channel_name, next_incarnation()))

    async def renew(self) -> bool:
        """Begin another process in its actor; False where that is gone too."""
        return await renewed(self._actor, self.terms)

    def kill(self) -> None:
        """End it without waiting: through Ray, which gives its bundle back, and by signal."""
        ray.kill(self._actor, no_restart=True)
        if self._process is not None:
            self._process.kill()

    def _start(self, terms: bytes | None) -> ActorHandle:
        options = drafter_options(self._config.drafter_share())
        actor = ray.remote(DrafterActor).options(max_restarts=0, **options)
        return actor.remote(self._config, self._core, terms)

    async def _answer(self, asked: Awaitable[Any]) -> Any:
        """Of its actor, which gives its process less time than this: what fails then is the actor, or Ray.

        Raises:
            TimeoutError: there is none.
        """
        patience_s = self._config.drafter_start_timeout_s + LATE_S
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            raise TimeoutError(f"the drafter's actor has not answered within {patience_s:.0f} s") from None
