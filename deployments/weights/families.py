"""Prometheus metrics of the served weights."""

from collections.abc import Iterator

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import gauge
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, by_key


def weights_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yield the metric whose labels name the weights of each engine."""
    yield gauge(
        "wingbeat_weights_info",
        "1, labelled with the digest of the pushed weights that are served, or 'settings' if none were pushed.",
        (*LABELS, "weights"),
        by_key(snapshot, lambda figures: {figures["weights"] or "settings": 1}),
    )
