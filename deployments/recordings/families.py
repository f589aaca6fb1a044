"""Prometheus metrics of the recording of live traffic, made for later training or for a head that learns."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, Read, rows


def recording_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yield the metrics of recordings: requests recorded, requests dropped, and whether recording has stopped."""
    yield counter(
        "wingbeat_recorded_requests",
        "Requests whose tokens and hidden states were written to disk.",
        LABELS,
        rows(snapshot, _of_recording(lambda found: found["num_sequences"])),
    )
    yield counter(
        "wingbeat_recording_dropped",
        "Requests that were selected for recording but dropped, for lack of memory or of a writable disk.",
        LABELS,
        rows(snapshot, _of_recording(lambda found: found["num_dropped"])),
    )
    yield gauge(
        "wingbeat_recording_stopped",
        "1 while nothing can be recorded, for example because the disk is full.",
        LABELS,
        rows(snapshot, _of_recording(lambda found: int(found["stopped"] is not None))),
    )


def _of_recording(read: Read) -> Read:
    """Return a reader of a figure of an engine's recording; the reader returns None if there is no recording."""

    def found(figures: dict[str, Any]) -> Any:
        recording = figures.get("recording")
        return None if recording is None else read(recording)

    return found
