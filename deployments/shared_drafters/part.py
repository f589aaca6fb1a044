"""Hooks of shared drafters. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
    from wingbeat.runtime.drafters.worker import DraftWorker
    from wingbeat.runtime.shared_drafters.shared_worker import SharedWorker

asked = "wingbeat.deployments.shared_drafters.settings:asked"
check_before_start = "wingbeat.deployments.shared_drafters.settings:check_before_start"
check_settings = "wingbeat.deployments.shared_drafters.settings:check_settings"
refusals = "wingbeat.deployments.shared_drafters.settings:REFUSED"
settings = "wingbeat.deployments.shared_drafters.settings:SETTINGS"


def num_shared_drafters(config: "AppConfig") -> int:
    """Return the number of shared drafters; 0 if each verifier has a drafter of its own."""
    return config.drafters.num if config.drafters is not None and config.has_drafter() else 0


def bind_drafters(config: "AppConfig", mark: str) -> Any:
    """Return the pool's deployment; None if each verifier has a drafter of its own."""
    if not num_shared_drafters(config):
        return None
    from wingbeat.deployments.shared_drafters.drafter_pool import deployment

    return deployment(mark).bind(config)


def launch_drafter(config: "AppConfig", pool: Any, channel: str | None) -> "Callable[..., Any] | None":
    """Return the function that creates a `PoolDrafter`, which gets slots in a shared drafter for a verifier; None if
    each verifier has a drafter of its own.
    """
    if not num_shared_drafters(config):
        return None
    from functools import partial

    from wingbeat.deployments.shared_drafters.pool_drafter import PoolDrafter, ServedPool

    falls_back = channel == "cuda_ipc" and config.channel == "auto"
    return partial(PoolDrafter, ServedPool(pool), falls_back=falls_back, patience_s=config.drafters.start_timeout_s)


def shared_worker(config: "AppConfig", worker: "DraftWorker") -> "SharedWorker | None":
    """Return a worker that serves several verifiers; None if each verifier has a drafter of its own."""
    if not num_shared_drafters(config):
        return None
    from wingbeat.deployments.shared_drafters.shared_calls import room_of
    from wingbeat.runtime.shared_drafters.shared_worker import SharedWorker

    return SharedWorker(worker, room_of(config, worker.drafter.device))


def families(snapshot: "FleetSnapshot") -> "Iterator[Metric]":
    """Yield the metric of shared drafters: for each engine, whether all drafters lack free slots or memory for the
    engine.
    """
    from wingbeat.deployments.metrics.families import gauge
    from wingbeat.deployments.metrics.rows import LABELS, rows

    yield gauge(
        "wingbeat_drafter_lacks_room",
        "1 while the engine decodes without drafts because the shared drafters have no room for it.",
        LABELS,
        rows(snapshot, lambda figures: int(figures["drafter_lacks_room"])),
    )
