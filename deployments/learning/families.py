"""Prometheus metrics of a draft head that learns."""

from collections.abc import Iterator

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, Read, by_key, rows


def learning_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yield the metrics about decisions on versions of the draft head, and about the learner."""
    yield counter(
        "wingbeat_head_decisions",
        "Versions of the draft head promoted, rejected, rolled back and refused, the same for all engines of a fleet.",
        (*LABELS, "decision"),
        by_key(snapshot, lambda figures: (figures.get("heads") or {}).get("decisions")),
    )
    yield counter(
        "wingbeat_learner_seconds",
        "Core-seconds that the learner has spent on training.",
        LABELS,
        rows(snapshot, _of_learner("seconds")),
    )
    yield gauge(
        "wingbeat_learner_samples",
        "Requests on disk that the learner trains on, without held-out ones.",
        LABELS,
        rows(snapshot, _of_learner("samples")),
    )
    yield gauge("wingbeat_learner_bytes", "Bytes of rounds on disk.", LABELS, rows(snapshot, _of_learner("bytes")))


def _of_learner(name: str) -> Read:
    """Return a reader of a learner's figure; the reader returns None if there is no learner."""
    return lambda figures: ((figures.get("heads") or {}).get("learner") or {}).get(name)
