"""Writes metrics in Prometheus' text format or OpenMetrics."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.wingbeat_families import wingbeat_families
from wingbeat.deployments.parts import hooks


class SnapshotCollector(Collector):
    """Collector of prometheus_client for snapshots, one per model."""

    def __init__(self, *snapshots: FleetSnapshot) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Yields all metric families, including families without samples, because their names and help texts serve as
        documentation.
        """
        for same in zip(*map(_families, self._snapshots), strict=True):
            yield _joined(same)


def _families(snapshot: FleetSnapshot) -> Iterable[Metric]:
    more = (families(snapshot) for families in hooks("families"))
    return chain(wingbeat_families(snapshot), *more)


def _joined(families: Sequence[Metric]) -> Metric:
    """Merges the families of one name from several models. Samples with equal labels are summed; these are the samples
    of the router, which have no model label.
    """
    first, *others = families
    if not others:
        return first
    rows = {(sample.name, *sorted(sample.labels.items())): sample for sample in first.samples}
    for sample in chain.from_iterable(family.samples for family in others):
        key = (sample.name, *sorted(sample.labels.items()))
        known = rows.get(key)
        rows[key] = sample if known is None else known._replace(value=known.value + sample.value)
    first.samples = list(rows.values())
    return first


def exposed(snapshots: Iterable[FleetSnapshot], accept: str) -> tuple[bytes, str]:
    """Returns body and media type: OpenMetrics 1.0.0 if the `Accept` header requests it, else Prometheus' text format.

    Metric names are the same in both formats, whatever escaping the header requests. The colon in vLLM's names is legal
    in both formats, but by default the library would replace the colon by an underscore.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(*snapshots))
    _, wanted = choose_encoder(accept)
    if wanted.startswith("application/openmetrics-text"):
        return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4
