"""Ranks 1 and higher of a replica's engine. Each rank is an actor in a bundle of the replica's placement group."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import ray
from ray.exceptions import RayError

from wingbeat.cluster.placement import actor_options, assigned_devices, claim_devices, in_bundle
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.runtime.tensor_parallel.group import RankGroup


class RankActor:
    """Ray actor of a rank other than 0, which executes rank 0's commands until rank 0 ends.

    Torch is imported in `follow`, which runs on the actor's only thread.
    """

    def __init__(self, config: AppConfig) -> None:
        show_log()
        if config.num_gpus_per_verifier > 0:
            claim_devices(assigned_devices())
        self._config = config

    def process(self) -> ActorProcess:
        """Return this actor's process and node."""
        return ActorProcess.own()

    def follow(self, group: RankGroup, rank: int) -> None:
        """Load this rank's part of the model and execute rank 0's commands; returns when rank 0 ends the group.

        Raises:
            Exception: the model cannot be loaded, or rank 0 is gone.
        """
        import torch

        torch.set_num_threads(self._config.num_threads())
        torch.set_flush_denormal(True)
        from wingbeat.deployments.replica.engine.build import pair_settings
        from wingbeat.runtime.tensor_parallel.follower import follow

        settings = pair_settings(self._config)
        device = torch.device(self._config.resolved_device())
        follow(group, rank, settings.model, settings.dtype, device, settings.engine)


class RayRanks:
    """Ranks 1 and higher of one engine process. When one of these ranks ends, the engine is ended too."""

    def __init__(self, config: AppConfig) -> None:
        size, share = config.tensor_parallel_size, config.verifier_share()
        self._folder = Path(tempfile.mkdtemp(prefix="wingbeat-ranks-"))
        self.group = RankGroup(self._folder / "store", size)
        self._actors = [
            # Ranks 1 and up are the last bundles of the calling process's group.
            ray.remote(RankActor).options(max_restarts=0, **actor_options(share, in_bundle(rank - size))).remote(config)
            for rank in range(1, size)
        ]
        self._processes: dict[int, ActorProcess] = {}
        # The process is requested before `follow` is called, because an actor runs its calls one after the other, and
        # the call of `follow` runs as long as the actor exists.
        self._asked = [actor.process.remote() for actor in self._actors]
        self._following = [actor.follow.remote(self.group, rank) for rank, actor in enumerate(self._actors, start=1)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that have started, in the order of the ranks."""
        return [process.pid for _, process in sorted(self._processes.items())]

    async def lost(self) -> str:
        """Wait until a rank has ended; returns the reason."""
        ends = [asyncio.ensure_future(self._end(rank)) for rank in range(1, self.group.size)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end.result() for end in ends if end.done())
        finally:
            for end in ends:
                end.cancel()

    def kill(self) -> None:
        """Kill all ranks without waiting for their end. The ranks are killed through Ray, so that their bundles are
        freed, and also by signals.
        """
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
