"""Batches are padded to the smallest of a few sizes."""

import pytest

from wingbeat.runtime.graphs.graph_runner import batch_buckets, bucket_for


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
        (80, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80)),
        (300, (*batch_buckets(256), 288, 300)),
    ],
)
def test_batch_buckets_end_with_the_largest_batch(max_num_seqs, expected):
    assert batch_buckets(max_num_seqs) == expected
    assert list(expected) == sorted(set(expected))


def test_a_bucket_is_the_smallest_that_holds_the_batch():
    buckets = batch_buckets(100)
    for n in range(1, 101):
        chosen = bucket_for(n, buckets)
        assert n <= chosen
        assert not [bucket for bucket in buckets if n <= bucket < chosen]


@pytest.mark.parametrize("n", [0, -1, 101])
def test_batches_without_a_bucket_are_refused(n):
    with pytest.raises(ValueError, match=f"^{n} has no bucket"):
        bucket_for(n, batch_buckets(100))


def test_no_sequences_have_no_buckets():
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        batch_buckets(0)
