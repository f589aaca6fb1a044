"""Batches are padded to the smallest bucket that holds them."""

import pytest

from wingbeat.runtime.graphs.buckets import batch_buckets, bucket_for, within


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


def test_few_batches_all_have_graphs():
    batches = {1: batch_buckets(16), 8: batch_buckets(16)}
    assert within(10, batches) == batches


@pytest.mark.parametrize("most", [10, 20, 40])
def test_many_batches_share_the_graphs_and_keep_the_smallest_and_the_largest(most):
    batches = {1: batch_buckets(256), 4: batch_buckets(256), 60: batch_buckets(32)}
    kept = within(most, batches)
    assert sum(map(len, kept.values())) <= most
    for rows, sizes in kept.items():
        assert set(sizes) <= set(batches[rows])
        assert (sizes[0], sizes[-1]) == (batches[rows][0], batches[rows][-1])
    assert len(kept[4]) >= len(kept[1]), "rows that a pass has for nothing need no graphs of their own"
