"""Acceptance is learned from confidence, by depth and by request, and the growth rule follows it."""

import numpy as np
import pytest

from wingbeat.runtime.speculation.acceptance import (
    NUM_BINS,
    AcceptanceTracker,
    confidence_bins,
    path_probabilities,
)

MAX_DEPTH = 4


def chain_round(chance, num_reqs, acceptance, log_probs=None):
    """A verified chain of MAX_DEPTH per request: (log_probs, depths, tried, accepted)."""
    width = MAX_DEPTH + 1
    depths = np.tile(np.arange(width), (num_reqs, 1))
    hits = chance.random((num_reqs, width)) < acceptance
    hits[:, 0] = True
    accepted = np.cumprod(hits, axis=1).astype(bool)
    tried = np.concatenate([np.zeros((num_reqs, 1), bool), accepted[:, :-1]], axis=1)
    accepted[:, 0] = False
    given = np.full((num_reqs, width), np.log(0.4)) if log_probs is None else log_probs
    return given, depths, tried, accepted


def test_bins_ascend_with_confidence_and_take_any_float():
    log_probs = np.log(np.array([1e-12, 1e-3, 0.05, 0.3, 0.5, 0.8, 0.99, 1.0]))
    bins = confidence_bins(log_probs)
    assert (np.diff(bins) >= 0).all()
    assert (bins[0], bins[-1]) == (0, NUM_BINS - 1)
    assert confidence_bins(np.array([-1e300, 0.0, 3.0])).tolist() == [0, NUM_BINS - 1, NUM_BINS - 1]


def test_path_probability_is_the_product_over_ancestors():
    chance = np.random.default_rng(0)
    parents = np.array([[-1, 0, 0, 1, 1, 2, 3, 6], [-1, 0, 1, 2, 3, 4, 5, 6]])
    conditional = chance.random(parents.shape)
    for row, up in enumerate(parents):
        expected = [1.0]
        for node in range(1, len(up)):
            expected.append(expected[up[node]] * conditional[row, node])
        depth = 4 if row == 0 else 7
        found = path_probabilities(conditional[row : row + 1], parents[row : row + 1], depth)
        assert found[0] == pytest.approx(expected)


def test_confidences_are_calibrated_by_what_was_accepted():
    tracker, chance = AcceptanceTracker(4, MAX_DEPTH), np.random.default_rng(1)
    sampled, slots = np.zeros(4, bool), np.arange(4)
    low, high = np.full((4, MAX_DEPTH + 1), np.log(0.1)), np.full((4, MAX_DEPTH + 1), np.log(0.9))
    for _ in range(300):
        for given, acceptance in ((low, 0.5), (high, 0.9)):
            log_probs, depths, tried, accepted = chain_round(chance, 4, acceptance, given)
            tracker.record(log_probs, depths, sampled, slots, tried, accepted)
    depths = np.tile(np.arange(MAX_DEPTH + 1), (4, 1))
    assert tracker.conditional(low, depths, sampled, slots)[:, 1:].mean() == pytest.approx(0.5, abs=0.06)
    assert tracker.conditional(high, depths, sampled, slots)[:, 1:].mean() == pytest.approx(0.9, abs=0.06)
    assert tracker.expected_accepted == pytest.approx(tracker.num_accepted, rel=0.05)


def test_sampled_requests_have_a_table_of_their_own():
    tracker, chance = AcceptanceTracker(2, MAX_DEPTH), np.random.default_rng(2)
    before = tracker.table[0].copy()
    for _ in range(50):
        log_probs, depths, tried, accepted = chain_round(chance, 2, 0.1)
        tracker.record(log_probs, depths, np.ones(2, bool), np.arange(2), tried, accepted)
    assert (tracker.table[0] == before).all()
    assert tracker.table[1, confidence_bins(np.log(np.array([0.4])))[0]] < 0.2


def test_a_request_that_is_hard_to_draft_counts_for_less_until_its_slot_changes_hands():
    tracker, chance = AcceptanceTracker(2, MAX_DEPTH), np.random.default_rng(3)
    for _ in range(60):
        easy, hard = chain_round(chance, 1, 0.95), chain_round(chance, 1, 0.3)
        both = [np.concatenate(pair) for pair in zip(easy, hard, strict=True)]
        tracker.record(both[0], both[1], np.zeros(2, bool), np.arange(2), both[2], both[3])
    assert tracker.request_factors[0] > 1.05
    assert tracker.request_factors[1] < 0.8
    tracker.admit(1)
    assert tracker.request_factors[1] == 1.0


def test_deeper_levels_are_trusted_less_where_they_fail():
    tracker, chance = AcceptanceTracker(1, MAX_DEPTH), np.random.default_rng(4)
    by_depth = np.array([1.0, 0.9, 0.9, 0.9, 0.2])
    for _ in range(400):
        log_probs, depths, tried, accepted = chain_round(chance, 1, by_depth)
        tracker.record(log_probs, depths, np.zeros(1, bool), np.zeros(1, np.int64), tried, accepted)
    assert tracker.depth_factors[4] < 0.5 * tracker.depth_factors[1]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_lone_chains_path_is_the_path(sampled):
    tracker, chance = AcceptanceTracker(3, MAX_DEPTH), np.random.default_rng(6)
    kind, slots = np.array([sampled] * 3), np.arange(3)
    for _ in range(30):
        log_probs, depths, tried, accepted = chain_round(chance, 3, 0.7, np.log(chance.random((3, MAX_DEPTH + 1))))
        tracker.record(log_probs, depths, kind, slots, tried, accepted)
    log_probs = np.log(chance.random((1, MAX_DEPTH + 1)))
    log_probs[0, 0] = 0.0
    parents = np.arange(MAX_DEPTH + 1)[None] - 1
    conditional = tracker.conditional(log_probs, parents + 1, kind[:1], slots[1:2])
    expected = path_probabilities(conditional, parents, MAX_DEPTH)
    assert tracker.chain_path(log_probs[0].cumsum().tolist(), sampled, 1) == pytest.approx(expected[0])
