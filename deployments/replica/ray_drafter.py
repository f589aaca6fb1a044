"""A replica's way to its drafter: an actor in the second bundle of its placement group."""

import contextlib
import os
import signal
from collections.abc import Callable

import ray

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.placement import Share, drafter_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafter_actor import DrafterActor
from wingbeat.deployments.replica.engine_setup import DrafterStartError
from wingbeat.deployments.replica.supervisor import root_cause


class RayDrafter:
    """One drafter actor.

    Args:
        convention: how it shall read its head, pickled; None where that is not settled.
    """

    def __init__(self, config: AppConfig, core: int | None, convention: bytes | None = None) -> None:
        share = Share(config.num_cpus_per_drafter, config.num_gpus_per_drafter)
        options = drafter_options(share)
        self._actor = ray.remote(DrafterActor).options(max_restarts=0, **options).remote(config, core, convention)
        self.convention = convention
        """How it was told to read its head; its successors are told the same."""
        self._process: PeerProcess | None = None

    async def needs(self, convention: bytes) -> bytes:
        """What it needs of its verifier, once it is ready; both pickled.

        Raises:
            DrafterStartError: it cannot start; names the cause.
        """
        self.convention = convention
        try:
            return await self._actor.needs.remote(convention)
        except ray.exceptions.RayError as error:
            raise DrafterStartError(f"the drafter cannot start: {root_cause(error)}") from None

    async def attach(self, channel_name: str, next_incarnation: Callable[[], int]) -> int:
        """Make it serve a channel, once it is ready; its process id."""
        pid = await self._actor.pid.remote()
        self._process = PeerProcess(pid, process_start(pid))
        await self._actor.attach.remote(channel_name, next_incarnation())
        return pid

    def kill(self) -> None:
        """Through Ray, which gives its bundle back, and by signal: a stopped process reads no request to exit."""
        ray.kill(self._actor, no_restart=True)
        if self._process is not None and self._process.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
