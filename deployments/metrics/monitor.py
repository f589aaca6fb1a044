"""Sources of a router's metrics and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat.deployments.metrics.fleet_figures import FleetFigures


@dataclass(frozen=True)
class Monitor:
    """Sources of metrics, and watchers of requests."""

    fleets: Sequence[FleetFigures]
    """Figures of all engines and routers, one object per model."""
    watchers: Sequence[Any] = ()
    """Request watchers of optional parts; each is an `api.guard.RequestWatcher`."""
    access_log: bool = False
    """Whether every request is logged."""
