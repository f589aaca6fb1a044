"""A replica's handle of its drafter, which is an actor in the second bundle of the replica's placement group, on any
node.
"""

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
"""Seconds that the replica waits beyond the actor's own time limit, so that the actor can report that its process has
not answered.
"""


class RayDrafter:
    """Handle of a drafter actor that the replica owns.

    Args:
        terms: pickled `DrafterTerms`; None if the verifier has not sent them yet.
    """

    def __init__(self, config: AppConfig, core: int | None, terms: bytes | None = None) -> None:
        self._config, self._core = config, core
        self._process: ActorProcess | None = None
        self._actor = self._start(terms)
        self.terms = terms
        """Pickled `DrafterTerms` that the verifier has sent; drafters that replace this drafter get equal terms."""

    async def needs(self, terms: bytes) -> bytes:
        """Wait until the drafter is loaded, then return its pickled `DrafterNeeds`.

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
        """Wait until the drafter is loaded, then attach it to a channel; returns the id of the drafter's process."""
        if self._process is None:
            self._process = (await self._answer(self._actor.status.remote())).process
        return await self._answer(self._actor.call.remote("attach", channel_name, next_incarnation()))

    async def renew(self) -> bool:
        """Start a new process in the same actor; returns False if the actor is gone or stuck."""
        return await renewed(self._actor, self.terms)

    def kill(self) -> None:
        """Kill the actor without waiting for its end. The actor is killed through Ray, so that its bundle is freed, and
        also by a signal.
        """
        ray.kill(self._actor, no_restart=True)
        if self._process is not None:
            self._process.kill()

    def _start(self, terms: bytes | None) -> ActorHandle:
        options = drafter_options(self._config.drafter_share())
        actor = ray.remote(DrafterActor).options(max_restarts=0, **options)
        return actor.remote(self._config, self._core, terms)

    async def _answer(self, asked: Awaitable[Any]) -> Any:
        """Wait for the actor's answer and return it.

        The actor's time limit for its process is shorter than the limit of this call, so a timeout here means that the
        actor or Ray failed.

        Raises:
            TimeoutError: the actor has not answered.
        """
        patience_s = self._config.drafter_start_timeout_s + LATE_S
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            raise TimeoutError(f"the drafter's actor has not answered within {patience_s:.0f} s") from None
