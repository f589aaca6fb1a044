"""Figures in the text that Prometheus reads."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.vllm_families import vllm_families
from wingbeat.deployments.metrics.wingbeat_families import wingbeat_families


class SnapshotCollector(Collector):
    """Shows a snapshot to a registry of prometheus_client."""

    def __init__(self, snapshot: FleetSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """All families, those without a row too: their names are the documentation."""
        yield from vllm_families(self._snapshot)
        yield from wingbeat_families(self._snapshot)


def exposed(snapshot: FleetSnapshot, accept: str) -> tuple[bytes, str]:
    """The snapshot as a body and its media type, in the newest format that an `Accept` header takes."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type
