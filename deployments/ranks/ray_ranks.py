"""The ranks that a replica's engine leads, each an actor in a bundle of the replica's placement group."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import ray
from ray.exceptions import RayError

from wingbeat.cluster.placement import assigned_devices, claim_devices, member_options
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.runtime.tensor_parallel.group import RankGroup


class RankActor:
    """One further rank: beside its replica, it does what rank 0 tells it until that ends.

    Torch is imported where it follows, on the actor's one thread.
    """

    def __init__(self, config: AppConfig) -> None:
        show_log()
        if config.num_gpus_per_verifier > 0:
            claim_devices(assigned_devices())
        self._config = config

    def process(self) -> ActorProcess:
        """This process, and where it runs."""
        return ActorProcess.own()

    def follow(self, group: RankGroup, rank: int) -> None:
        """Load this rank's part of the model and run what rank 0 runs; returns when that says so.

        Raises:
            Exception: the model cannot be loaded, or rank 0 is gone.
        """
        import torch

        torch.set_num_threads(self._config.num_threads())
        from wingbeat.deployments.replica.engine.build import pair_settings
        from wingbeat.runtime.tensor_parallel.follower import follow

        settings = pair_settings(self._config)
        device = torch.device(self._config.resolved_device())
        follow(group, rank, settings.model, settings.dtype, device, settings.engine)


class RayRanks:
    """Ranks 1 and up of one life of an engine, which ends with the first of them."""

    def __init__(self, config: AppConfig) -> None:
        size, share = config.tensor_parallel_size, config.verifier_share()
        self._folder = Path(tempfile.mkdtemp(prefix="wingbeat-ranks-"))
        self.group = RankGroup(self._folder / "store", size)
        self._actors = [
            ray.remote(RankActor).options(max_restarts=0, **member_options(share, rank, size)).remote(config)
            for rank in range(1, size)
        ]
        self._processes: dict[int, ActorProcess] = {}
        # An actor runs one call after the other, and the second one lasts as long as it does.
        self._asked = [actor.process.remote() for actor in self._actors]
        self._following = [actor.follow.remote(self.group, rank) for rank, actor in enumerate(self._actors, start=1)]

    @property
    def pids(self) -> list[int]:
        """Of the processes that have started, by rank."""
        return [process.pid for _, process in sorted(self._processes.items())]

    async def lost(self) -> str:
        """Return once a rank has ended, with what it ended by."""
        ends = [asyncio.ensure_future(self._end(rank)) for rank in range(1, self.group.size)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end.result() for end in ends if end.done())
        finally:
            for end in ends:
                end.cancel()

    def kill(self) -> None:
        """End them without waiting: through Ray, which gives their bundles back, and by signal."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        for process in self._processes.values():
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, rank: int) -> str:
        try:
            self._processes[rank] = await self._asked[rank - 1]
            await self._following[rank - 1]
        except RayError as error:
            return f"rank {rank} of the verifier is gone: {root_cause(error)}"
        return f"rank {rank} of the verifier has ended"
