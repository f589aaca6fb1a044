"""Makes prometheus_client's metric families from rows of figures."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Row = tuple[Sequence[str], Any]
"""Row of a family: (values of the labels, value of the sample)."""


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> GaugeMetricFamily:
    """Makes a gauge family."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> CounterMetricFamily:
    """Makes a counter family. Its values are sums since the engine's start; its samples are named `name` + `_total`."""
    # The sample `_created` is left out, because programs that sum all lines with a prefix would add its timestamp.
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> HistogramMetricFamily:
    """Makes a histogram family from rows whose values are `wingbeat.runtime.metrics.Histogram` as plain data."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, counts in rows:
        cumulative = accumulate(counts["counts"])
        bounds = [*(str(float(bound)) for bound in counts["bounds"]), "+Inf"]
        buckets = list(zip(bounds, cumulative, strict=True))
        family.add_metric(values, buckets, counts["total"])
    return family
