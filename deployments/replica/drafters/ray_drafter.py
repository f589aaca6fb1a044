"""A replica's way to its drafter: an actor in the second bundle of its placement group, on whichever node that lies."""

from collections.abc import Callable

import ray
from ray.exceptions import RayError

from wingbeat.cluster.channels.tcp.remote_address import ChannelName
from wingbeat.cluster.placement import drafter_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor, renewed
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError


class RayDrafter:
    """One drafter actor.

    Args:
        convention: how it shall read its head, pickled; None where that is not settled.
    """

    def __init__(self, config: AppConfig, core: int | None, convention: bytes | None = None) -> None:
        options = drafter_options(config.drafter_share())
        self._process: ActorProcess | None = None
        self._actor = ray.remote(DrafterActor).options(max_restarts=0, **options).remote(config, core, convention)
        self.convention = convention
        """How it was told to read its head; its successors are told the same."""

    async def needs(self, convention: bytes) -> bytes:
        """What it needs of its verifier, once it is ready; both pickled.

        Raises:
            DrafterStartError: it cannot start; names the cause.
        """
        self.convention = convention
        try:
            return await self._actor.call.remote("needs", convention)
        except RayError as error:
            raise DrafterStartError(f"the drafter cannot start: {root_cause(error)}") from None

    async def attach(self, channel_name: ChannelName, next_incarnation: Callable[[], int]) -> int:
        """Make it serve a channel, once it is ready; its process id."""
        if self._process is None:
            self._process = (await self._actor.status.remote()).process
        return await self._actor.call.remote("attach", channel_name, next_incarnation())

    async def renew(self) -> bool:
        """Begin another process in its actor; False where that is gone too."""
        return await renewed(self._actor, self.convention)

    def kill(self) -> None:
        """End it without waiting: through Ray, which gives its bundle back, and by signal."""
        ray.kill(self._actor, no_restart=True)
        if self._process is not None:
            self._process.kill()
