"""Rows of figures as prometheus_client's metric families."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Row = tuple[Sequence[str], Any]
"""(label values, value)"""


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> GaugeMetricFamily:
    """A value that goes up and down."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> CounterMetricFamily:
    """A sum since the engine's start; shown as `name` with `_total` at its end."""
    # Without the moment of its creation: readers that sum up lines by their beginnings would take it for a count.
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> HistogramMetricFamily:
    """Counts by size, from `wingbeat.runtime.metrics.Histogram` as plain data."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, counts in rows:
        cumulative = accumulate(counts["counts"])
        bounds = [*(str(float(bound)) for bound in counts["bounds"]), "+Inf"]
        buckets = list(zip(bounds, cumulative, strict=True))
        family.add_metric(values, buckets, counts["total"])
    return family
