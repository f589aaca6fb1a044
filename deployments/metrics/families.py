"""Makes prometheus_client's metric families from rows of figures."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Row = tuple[Sequence[str], Any]
"""(label values, value)"""


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> GaugeMetricFamily:
    """Makes a gauge family."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> CounterMetricFamily:
    """Makes a counter family (sums since the engine's start), whose samples are `name` with the suffix `_total`."""
    # Without the `_created` sample: readers that sum lines by prefix would add its timestamp.
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> HistogramMetricFamily:
    """Makes a histogram family from `wingbeat.runtime.metrics.Histogram` as plain data."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, counts in rows:
        cumulative = accumulate(counts["counts"])
        bounds = [*(str(float(bound)) for bound in counts["bounds"]), "+Inf"]
        buckets = list(zip(bounds, cumulative, strict=True))
        family.add_metric(values, buckets, counts["total"])
    return family
