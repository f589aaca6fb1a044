"""What one router shows of the application, beside the API that it serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures


@dataclass(frozen=True)
class Monitor:
    """Who measures, and where the figures are."""

    own: RouterFigures
    """What this router measures."""
    fleets: Sequence[FleetFigures]
    """What all engines and routers measured, by model."""
    watchers: Sequence[Any] = ()
    """What of parts looks at requests, each an `api.guard.RequestWatcher`."""
    access_log: bool = False
    """Whether every request is logged."""
