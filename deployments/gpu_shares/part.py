"""Hooks that choose GPU shares at the start.

`shares` is imported only when needed, because commands import this file.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

take_gpus = "wingbeat.deployments.gpu_shares.shares:take_gpus"


def leaves_gpus_open(config: "AppConfig") -> bool:
    """Whether GPU shares are chosen at the start. For a user's engine and for an engine directory, the settings must
    give the shares.
    """
    given = {"num_gpus_per_verifier", "num_gpus_per_drafter"} & config.model_fields_set
    return not given and config.device != "cpu" and config.is_wingbeats_own()
