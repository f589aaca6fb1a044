"""Acceptance is learned by confidence, multiplied along paths, and believes no drafter's floats."""

import numpy as np
import pytest

from tests.runtime.adaptive.reference_choice import drafted_trees
from wingbeat.runtime.adaptive.acceptance import (
    NO_CONFIDENCE,
    Acceptance,
    DraftedTrees,
    bin_edges,
    given_parent,
    path_probabilities,
)
from wingbeat.runtime.config import NUM_BINS

FLAT = np.full((1, NUM_BINS), 0.5)


def trees(parents, scores, num_valid=None, max_depth=8):
    """A tree of these nodes; scores are cumulative."""
    parents = np.array([parents])
    depths = np.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[0, node] = depths[0, parents[0, node]] + 1
    valid = np.array([parents.shape[1] if num_valid is None else num_valid])
    return drafted_trees(parents, depths, np.array([scores]), valid, max_depth)


def test_a_path_is_as_likely_as_its_nodes_together():
    tree = trees([-1, 0, 1, 0, 2], [0.0, -0.1, -0.2, -0.3, -0.4])
    assert path_probabilities(FLAT, tree)[0] == pytest.approx([1.0, 0.5, 0.25, 0.5, 0.125])
    chain = trees([-1, 0, 1, 2], [0.0, -0.1, -0.2, -0.3])
    assert path_probabilities(FLAT, chain)[0] == pytest.approx([1.0, 0.5, 0.25, 0.125])


def test_what_does_not_count_is_never_accepted():
    tree = trees([-1, 0, 1, 2, 3], [0.0, -0.1, -0.2, -0.3, -0.4], num_valid=4, max_depth=2)
    assert tree.real.tolist() == [[False, True, True, False, False]]
    assert path_probabilities(FLAT, tree)[0] == pytest.approx([1.0, 0.5, 0.25, 0.0, 0.0])
    assert tree.depths.max() == 2


def test_confidences_are_conditional_and_hostile_ones_hopeless():
    hostile = [0.0, -0.5, -1.5, float("nan"), float("inf"), -float("inf"), 7.0]
    tree = trees([-1, 0, 1, 0, 0, 0, 0], hostile)
    assert tree.log_probs[0, 1:].tolist() == [-0.5, -1.0, NO_CONFIDENCE, 0.0, NO_CONFIDENCE, 0.0]


def test_bins_are_steps_of_log_odds():
    table = np.arange(float(NUM_BINS))[None]
    edges = bin_edges()
    assert given_parent(table, edges[None] - 1e-9)[0].tolist() == list(range(NUM_BINS - 1))
    assert given_parent(table, edges[None] + 1e-9)[0].tolist() == list(range(1, NUM_BINS))
    assert given_parent(table, np.log([[0.5 - 1e-9]])) == NUM_BINS // 2 - 1


@pytest.mark.parametrize("kind", [0, 1])
def test_the_table_comes_to_what_is_accepted_and_other_kinds_keep_theirs(kind):
    subject, chance = Acceptance(), np.random.default_rng(1)
    before = subject.table.copy()
    count = 64
    for _ in range(60):
        log_probs = np.log(np.array([[0.5, 0.3, 0.9]] * count))
        tree = DraftedTrees(np.tile([0, 0, 1], (count, 1)), np.tile([0, 1, 2], (count, 1)), log_probs, log_probs < 0)
        tried = np.zeros((count, 3), dtype=bool)
        tried[:, 1] = True
        subject.record(tree, np.full(count, kind), tried, tried & (chance.random((count, 3)) < 0.8))
    seen = given_parent(subject.table[[kind]], np.log([[0.3]]))[0, 0]
    assert seen == pytest.approx(0.8, abs=0.04)
    assert (subject.table[1 - kind] == before[1 - kind]).all()
    assert (subject.table[kind] != before[kind]).sum() == 1, "only nodes whose parent was accepted are evidence"
    assert subject.num_accepted == pytest.approx(0.8 * 64 * 60, rel=0.05)
    assert subject.expected_accepted == pytest.approx(subject.num_accepted, rel=0.1)


def test_old_evidence_fades():
    subject = Acceptance()
    tree = DraftedTrees(np.zeros((1, 2), int), np.array([[0, 1]]), np.log([[0.5, 0.3]]), np.array([[False, True]]))
    tried = np.array([[False, True]])
    for accepted, rounds in ((True, 3000), (False, 6000)):
        for _ in range(rounds):
            subject.record(tree, np.array([0]), tried, tried & accepted)
    assert given_parent(subject.table[[0]], np.log([[0.3]]))[0, 0] < 0.1
