"""A replica's handle of its drafter: an actor in the second bundle of its placement group, on any node."""

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
"""Seconds for an actor to report that its process has not answered; the engine's own timeout is a little longer."""


class RayDrafter:
    """A drafter actor.

    Args:
        terms: pickled `DrafterTerms`; None if they are not settled yet.
    """

    def __init__(self, config: AppConfig, core: int | None, terms: bytes | None = None) -> None:
        self._config, self._core = config, core
        self._process: ActorProcess | None = None
        self._actor = self._start(terms)
        self.terms = terms
        """Pickled terms that the verifier sent; replacements of this drafter get the same terms."""

    async def needs(self, terms: bytes) -> bytes:
        """Pickled `DrafterNeeds`, once the drafter is loaded.

        Args:
            terms: pickled `DrafterTerms`.

        Raises:
            DrafterStartError: the drafter cannot start; the message names the cause.
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
        """Attach the drafter to a channel, once it is loaded. Returns its process id."""
        if self._process is None:
            self._process = (await self._answer(self._actor.status.remote())).process
        return await self._answer(self._actor.call.remote("attach", channel_name, next_incarnation()))

    async def renew(self) -> bool:
        """Begin another process in the same actor; False if the actor is gone too."""
        return await renewed(self._actor, self.terms)

    def kill(self) -> None:
        """Kill the actor without waiting: through Ray, which frees its bundle, and by signal."""
        ray.kill(self._actor, no_restart=True)
        if self._process is not None:
            self._process.kill()

    def _start(self, terms: bytes | None) -> ActorHandle:
        options = drafter_options(self._config.drafter_share())
        actor = ray.remote(DrafterActor).options(max_restarts=0, **options)
        return actor.remote(self._config, self._core, terms)

    async def _answer(self, asked: Awaitable[Any]) -> Any:
        """The actor's answer.

        The actor gives its process less time than this call has, so a timeout means that the actor or Ray failed.

        Raises:
            TimeoutError: the actor has not answered.
        """
        patience_s = self._config.drafter_start_timeout_s + LATE_S
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            raise TimeoutError(f"the drafter's actor has not answered within {patience_s:.0f} s") from None
