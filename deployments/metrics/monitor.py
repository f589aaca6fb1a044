"""Sources of a router's metrics and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures


@dataclass(frozen=True)
class Monitor:
    """Sources of metrics, and watchers of requests."""

    own: RouterFigures
    """Figures of this router."""
    fleets: Sequence[FleetFigures]
    """Figures of all engines and routers, one object per model."""
    watchers: Sequence[Any] = ()
    """Request watchers that optional parts add; each is an `api.guard.RequestWatcher`."""
    access_log: bool = False
    """Whether every request is logged."""
