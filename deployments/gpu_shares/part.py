"""Shares of GPUs, which settings may leave open until a start; imported by commands, so `shares` is imported later."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

take_gpus = "wingbeat.deployments.gpu_shares.shares:take_gpus"


def leaves_gpus_open(config: "AppConfig") -> bool:
    """An engine of the user's own and a TensorRT engine directory take a GPU only by a share that is given."""
    given = {"num_gpus_per_verifier", "num_gpus_per_drafter"} & config.model_fields_set
    return not given and config.device != "cpu" and config.is_wingbeats_own()
