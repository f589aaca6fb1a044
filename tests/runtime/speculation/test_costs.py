"""Costs are the tables, interpolated, and come to what rounds really take."""

import numpy as np
import pytest

from wingbeat.runtime.speculation.costs import CostTables, RoundCosts, ScaleAndOffset

TABLES = CostTables((1, 4), (0, 2, 4), ((1.0, 2.0, 3.0), (2.0, 6.0, 10.0)), (0.001, 0.002), (0.1, 0.2), (0.1, 0.4))


def test_passes_are_interpolated_between_batches_and_nodes_and_go_on_beyond():
    costs = RoundCosts(TABLES)
    assert costs.verify_s(1, np.array([0, 1, 4, 6]), 0.0) == pytest.approx([1.0, 1.5, 3.0, 4.0])
    assert costs.verify_s(4, np.array([0, 4, 16]), 100.0) == pytest.approx([2.2, 4.2, 10.2])
    assert costs.verify_s(2, np.array([0]), 0.0) == pytest.approx([4 / 3])
    assert costs.verify_s(9, np.array([0]), 0.0) == pytest.approx([2.0])
    assert costs.draft_s(4, np.array([0, 3])) == pytest.approx([0.2, 1.4])


@pytest.mark.parametrize("num_chunk_tokens", [0, 2])
def test_predictions_come_to_what_rounds_take_each_part_by_itself(num_chunk_tokens):
    costs = RoundCosts(TABLES)
    chunks_s = num_chunk_tokens * (10.0 - 2.0) / 16
    for _ in range(400):
        costs.observe_verify(1.5 * (6.0 + chunks_s), 4, 8, 0.0, num_chunk_tokens)
        costs.observe_verify(0.8 * (2.0 + chunks_s), 4, 0, 0.0, num_chunk_tokens)
        costs.observe_draft(3.0 * (1.4 + num_chunk_tokens * 0.1), 4, 3, num_chunk_tokens)
    assert costs.verify_s(4, np.array([0]), 0.0) == pytest.approx([1.6], rel=0.01)
    # What of it neither nodes nor context make longer, rounds and waits of one length do not tell.
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([9.0], rel=0.06)
    assert costs.draft_s(4, np.array([3])) == pytest.approx([4.2], rel=0.05)


def test_what_slows_passes_of_trees_down_is_expected_of_plain_ones_until_one_is_seen():
    costs = RoundCosts(TABLES)
    for num_extra in np.random.default_rng(0).integers(1, 13, size=2000):
        costs.observe_verify(1.0 + 2.0 * (2.0 + 0.5 * num_extra), 4, int(num_extra), 0.0)
    assert costs.verify_s(4, np.array([2, 12]), 0.0) == pytest.approx([7.0, 17.0], rel=0.03)
    # By the factor of the smallest trees seen, 12 / 5 of what the table says of them.
    assert costs.verify_s(4, np.array([0]), 0.0) == pytest.approx([4.8], rel=0.03)
    for _ in range(400):
        costs.observe_verify(2.0, 4, 0, 0.0)
    assert costs.verify_s(4, np.array([0, 8]), 0.0) == pytest.approx([2.0, 13.0], rel=0.03)


def test_an_interruption_is_not_a_cost():
    costs = RoundCosts(TABLES)
    for _ in range(30):
        costs.observe_verify(6.0, 4, 8, 0.0)
    costs.observe_verify(1000.0, 4, 8, 0.0)
    assert costs.verify_s(4, np.array([8]), 0.0)[0] < 6.0 * 1.06


@pytest.mark.parametrize("wrong", [{"context_s": (0.0,)}, {"verify_s": ((1.0, 2.0), (1.0, 2.0))}])
def test_tables_of_other_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match=r"one (row|column) per"):
        CostTables(**(vars(TABLES) | wrong))


def test_what_no_level_makes_longer_is_not_charged_to_levels():
    """Waits of trees of one to five levels that take what the table says, and as much again to get there."""
    waits, random = ScaleAndOffset(), np.random.default_rng(0)
    for level in random.integers(1, 6, size=1000):
        trees_s = 1.0 + 0.5 * level
        waits.observe(trees_s + 2.0, trees_s, 0.0, 0.05)
    assert waits.scale == pytest.approx(1.0, abs=0.3)
    assert waits.offset_s == pytest.approx(2.0, abs=0.6)
