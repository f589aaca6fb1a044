"""What one router shows of the application, beside the API that it serves."""

from dataclasses import dataclass

from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures


@dataclass(frozen=True)
class Monitor:
    """The figures behind `/metrics`."""

    own: RouterFigures
    """What this router measures."""
    fleet: FleetFigures
    """What all engines and routers measured."""
