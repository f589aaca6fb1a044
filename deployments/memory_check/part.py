"""The check among what is held against this machine before a start."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile


def check_memory(config: "AppConfig", file: "ConfigFile") -> None:
    """See `check.check_memory`."""
    from wingbeat.deployments.memory_check import check

    check.check_memory(config, file)
