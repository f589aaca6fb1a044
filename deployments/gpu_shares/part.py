"""Hooks that choose GPU shares at the start. Commands import this file, so it imports `shares` only when needed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

take_gpus = "wingbeat.deployments.gpu_shares.shares:take_gpus"


def leaves_gpus_open(config: "AppConfig") -> bool:
    """Whether GPU shares are chosen at the start. A user's engine and an engine directory need explicit shares."""
    given = {"num_gpus_per_verifier", "num_gpus_per_drafter"} & config.model_fields_set
    return not given and config.device != "cpu" and config.is_wingbeats_own()
