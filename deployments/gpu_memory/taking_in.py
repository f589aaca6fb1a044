"""Supervisor of a drafter whose channel is in GPU memory, which may not work between two processes."""

import logging
from functools import partial
from typing import Any

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters.supervisor import DrafterHandle, DrafterSupervisor, root_cause
from wingbeat.deployments.replica.engine.engine_messages import EngineStarted
from wingbeat.deployments.replica.engine_client import EngineFailed

logger = logging.getLogger(__name__)
FREED_S = 1.0
"""Seconds to wait until the GPU driver has freed the memory of a killed process."""


class TakingInSupervisor(DrafterSupervisor):
    """Supervisor that moves the channel to host memory, or the drafter to the engine's process, if GPU memory does not
    carry rounds.

    Args:
        arguments: see `DrafterSupervisor`.
        takes_in: whether the drafter may be loaded in the engine's process.
        problem: why the channel has already been moved from GPU memory to host memory; None if it was not moved.
    """

    def __init__(self, *arguments: Any, takes_in: bool, problem: str | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._takes_in, self._problem = takes_in, problem

    async def run(self) -> None:
        """See `DrafterSupervisor`. If the drafter runs in the engine's process, the method returns at once, because the
        drafter ends with that process.
        """
        if not self.taken_in:
            await super().run()

    async def _attach_first(self, drafter: DrafterHandle | None) -> None:
        self.fell_back = self._problem is not None
        if self._takes_in and self._problem is not None:
            drafter = await self._take_in(drafter, self._problem)
        if not self.taken_in:
            await self._attach_new(drafter)

    async def _attach(self) -> None:
        try:
            await super()._attach()
        except ChannelError as error:
            reason = root_cause(error)
            if self._takes_in:
                self._drafter = await self._take_in(self._drafter, reason)
                if self.taken_in:
                    return
            other = await self._call("fall_back", reason)
            if other is None:
                raise
            self._channel_name, self.fell_back = other, True
            await super()._attach()
        self._takes_in = False

    async def _take_in(self, drafter: DrafterHandle | None, reason: str) -> DrafterHandle | None:
        """Load the drafter in the engine's process; returns None, or a newly launched drafter if loading failed."""
        self._takes_in = False  # possible only for the first drafter, because later the KV pool occupies the memory
        self._drafter = drafter
        self._kill()
        await self._sleep(FREED_S)
        try:
            await self._call("take_drafter_in", reason)
        except EngineFailed:
            raise
        except Exception as error:
            logger.warning("The engine cannot load the drafter itself: %s", root_cause(error))
            return self._launch()
        self.taken_in = True
        return None


def may_take_drafter_in(config: AppConfig) -> bool:
    """Return whether an engine may load the drafter in its own process if two processes cannot share GPU memory.

    True only if neither `channel` nor `drafter_place` is set, and if verifier and drafter share one GPU.
    """
    by_name = config.channel != "auto" or "drafter_place" in config.model_fields_set
    alone = config.num_ranks() == 1 and config.has_own_drafter() and config.is_wingbeats_own()
    on_gpu = alone and not by_name and config.resolved_device() == config.drafter_device() == "cuda"
    return on_gpu and config.engine_config().drafter_beside


def drafter_supervisor(config: AppConfig, started: EngineStarted) -> "partial[TakingInSupervisor] | None":
    """Return the class of the drafter's supervisor, unless the drafter connects over the network."""
    if not isinstance(started.channel_name, str):
        return None
    takes_in = may_take_drafter_in(config)
    return partial(TakingInSupervisor, takes_in=takes_in, problem=started.channel_problem)
