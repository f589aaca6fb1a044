"""One further rank of a verifier: a Ray actor beside its replica, which does what rank 0 tells it until that ends."""

import logging

from wingbeat.cluster.placement import assigned_devices, claim_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.runtime.config import RankGroup

logger = logging.getLogger(__name__)


class RankActor:
    """Torch is imported where it follows, on the actor's one thread."""

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

        torch.set_num_threads(self._config.threads)
        from wingbeat.deployments.replica.engine.build import follow_rank_0

        follow_rank_0(self._config, group, rank)
