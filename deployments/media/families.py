"""Prometheus metrics of the encoders of images and audio."""

from collections.abc import Iterator

from prometheus_client import Metric

from wingbeat.deployments.metrics.families import counter, gauge
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.metrics.rows import LABELS, Read, rows
from wingbeat.runtime.media.media_input import AUDIO, IMAGE


def media_families(snapshot: FleetSnapshot) -> Iterator[Metric]:
    """Yields the metric families."""
    known = "Images or audio in prompt chunks whose embeddings were cached."
    parts = (
        ("wingbeat_media_encoded", "num_encoded", "Images or audio that the model's encoder has computed."),
        ("wingbeat_media_cache_hits", "num_hits", known),
    )
    for name, field, text in parts:
        yield counter(name, text, LABELS, rows(snapshot, _encoders(field)))
    for kind, stood in ((IMAGE, "an image"), (AUDIO, "audio")):
        text = f"Prompt tokens that stand for {stood}, of requests that have ended."
        yield counter(f"wingbeat_prompt_{kind}_tokens", text, LABELS, rows(snapshot, _tokens(kind)))
    text = "Bytes of cached embeddings of images and audio."
    yield gauge("wingbeat_media_cache_bytes", text, LABELS, rows(snapshot, _encoders("num_bytes")))


def _encoders(field: str) -> Read:
    return lambda figures: figures["parts"].get("media", {}).get(field)


def _tokens(kind: str) -> Read:
    return lambda figures: figures.get("clients") and figures["clients"]["span_tokens"].get(kind, 0)
