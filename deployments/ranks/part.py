"""Hooks of a verifier's ranks. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.ranks.ray_ranks import RayRanks

asked = "wingbeat.deployments.ranks.settings:asked"
check_settings = "wingbeat.deployments.ranks.settings:check_settings"
settings = "wingbeat.deployments.ranks.settings:SETTINGS"


def num_ranks(config: "AppConfig") -> int:
    """Return the number of processes of each verifier."""
    return config.tensor_parallel_size


def launch_ranks(config: "AppConfig") -> "Callable[[], RayRanks] | None":
    """Return the launcher of an engine's ranks 1 and higher; None if the engine's process holds the whole model."""
    if config.tensor_parallel_size == 1:
        return None
    from functools import partial

    from wingbeat.deployments.ranks.ray_ranks import RayRanks

    return partial(RayRanks, config)
