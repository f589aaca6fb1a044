"""Ranks of a verifier; imported by commands too, so that it imports what it adds later."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.ranks.ray_ranks import RayRanks

asked = "wingbeat.deployments.ranks.settings:asked"
check_settings = "wingbeat.deployments.ranks.settings:check_settings"
settings = "wingbeat.deployments.ranks.settings:SETTINGS"


def num_ranks(config: "AppConfig") -> int:
    """Processes of each verifier."""
    return config.tensor_parallel_size


def launch_ranks(config: "AppConfig") -> "Callable[[], RayRanks] | None":
    """Launches ranks 1 and up of an engine; None where its process has the whole model."""
    if config.tensor_parallel_size == 1:
        return None
    from functools import partial

    from wingbeat.deployments.ranks.ray_ranks import RayRanks

    return partial(RayRanks, config)
