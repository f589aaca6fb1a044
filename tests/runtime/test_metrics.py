"""Counts by size."""

from wingbeat.runtime.metrics import Histogram


def test_a_value_counts_in_the_first_bucket_that_reaches_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 12.0)


def test_a_value_can_count_several_times():
    histogram = Histogram((1.0,))
    histogram.observe(0.25, 4)
    assert (histogram.counts, histogram.total) == ([4, 0], 1.0)
