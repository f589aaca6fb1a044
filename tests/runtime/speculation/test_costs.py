"""Costs are the tables, interpolated, and come to what rounds really take."""

import numpy as np
import pytest

from wingbeat.runtime.speculation.costs import (
    PLAIN_BEFORE,
    CostTables,
    DraftTook,
    RoundCosts,
    RoundTook,
    ScaleAndOffset,
)

TABLES = CostTables((1, 4), (0, 2, 4), ((1.0, 2.0, 3.0), (2.0, 6.0, 10.0)), (0.001, 0.002), (0.1, 0.2), (0.1, 0.4))

NO_TREES = DraftTook(0.0, 0, 0)


def behind_draft(costs, seconds, num_reqs, num_extra, num_chunk_tokens=0, draft=NO_TREES):
    costs.observe(RoundTook(seconds, num_reqs, num_extra, 0.0, num_chunk_tokens, draft))


def plain(costs, seconds, num_reqs, count, num_chunk_tokens=0):
    for _ in range(count):
        costs.observe(RoundTook(seconds, num_reqs, 0, 0.0, num_chunk_tokens))


def test_passes_are_interpolated_between_batches_and_nodes_and_go_on_beyond():
    costs = RoundCosts(TABLES)
    assert costs.verify_s(1, np.array([0, 1, 4, 6]), 0.0) == pytest.approx([1.0, 1.5, 3.0, 4.0])
    assert costs.verify_s(4, np.array([0, 4, 16]), 100.0) == pytest.approx([2.2, 4.2, 10.2])
    assert costs.plain_s(4, 100.0) == pytest.approx(2.2)
    assert costs.plain_s(2, 0.0) == pytest.approx(4 / 3)
    assert costs.plain_s(9, 0.0) == pytest.approx(2.0)
    assert costs.draft_s(4, np.array([0, 3])) == pytest.approx([0.2, 1.4])


def test_phases_are_shown_at_the_batches_that_were_measured():
    shown = RoundCosts(TABLES).by_batch(3, 5)
    assert shown == {
        "plain": {1: pytest.approx(1.0), 4: pytest.approx(2.0)},
        "draft": {1: pytest.approx(0.4), 4: pytest.approx(1.4)},
        "verify": {1: pytest.approx(3.0), 4: pytest.approx(10.0)},
    }


@pytest.mark.parametrize("num_chunk_tokens", [0, 2])
def test_predictions_come_to_what_rounds_take_each_part_by_itself(num_chunk_tokens):
    costs = RoundCosts(TABLES)
    chunks_s = num_chunk_tokens * (10.0 - 2.0) / 16
    draft = DraftTook(3.0 * (1.4 + num_chunk_tokens * 0.1), 4, 3, num_chunk_tokens)
    for _ in range(400):
        behind_draft(costs, 1.5 * (6.0 + chunks_s), 4, 8, num_chunk_tokens, draft)
    plain(costs, 0.8 * (2.0 + chunks_s), 4, 400, num_chunk_tokens)
    assert costs.plain_s(4, 0.0) == pytest.approx(1.6, rel=0.01)
    # What of it neither nodes nor context make longer, rounds and waits of one length do not tell.
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([9.0], rel=0.06)
    assert costs.draft_s(4, np.array([3])) == pytest.approx([4.2], rel=0.05)


def test_what_slows_passes_of_trees_down_is_expected_of_plain_ones_until_one_is_seen():
    costs = RoundCosts(TABLES)
    for num_extra in np.random.default_rng(0).integers(1, 13, size=2000):
        behind_draft(costs, 1.0 + 2.0 * (2.0 + 0.5 * num_extra), 4, int(num_extra))
    assert costs.verify_s(4, np.array([2, 12]), 0.0) == pytest.approx([7.0, 17.0], rel=0.03)
    # By the factor of the smallest trees seen, 12 / 5 of what the table says of them.
    assert costs.plain_s(4, 0.0) == pytest.approx(4.8, rel=0.03)
    plain(costs, 2.0, 4, 400)
    assert costs.plain_s(4, 0.0) == pytest.approx(2.0, rel=0.03)
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([13.0], rel=0.03)


def test_rounds_around_a_draft_say_nothing_of_plain_rounds():
    """They tell the drafter, plan anew and find the caches of another: 5 s where a plain round takes 2."""
    costs = RoundCosts(TABLES)
    for _ in range(20):
        behind_draft(costs, 5.0, 4, 0)
        plain(costs, 5.0, 4, PLAIN_BEFORE)
        plain(costs, 2.0, 4, 3)
        costs.observe(RoundTook(5.0, 4, 0, 0.0, asks=True))
    assert costs.plain_s(4, 0.0) == pytest.approx(2.0)


def test_the_first_draft_behind_plain_rounds_says_nothing_of_those_that_follow_one_another():
    """It takes the context in that was kept back: 9 s for a round, and as long for its trees."""
    costs = RoundCosts(TABLES)
    for _ in range(20):
        plain(costs, 2.0, 4, 30)
        behind_draft(costs, 9.0, 4, 8, draft=DraftTook(9.0, 4, 3, 30))
        behind_draft(costs, 6.0, 4, 8, draft=DraftTook(1.4, 4, 3))
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([6.0])
    assert costs.draft_s(4, np.array([3])) == pytest.approx([1.4])


def test_plain_rounds_of_one_load_say_nothing_of_another_once_that_was_seen():
    costs = RoundCosts(TABLES)
    for seconds, num_reqs in ((1.0, 1), (4.0, 4), (1.0, 1)):
        plain(costs, seconds, num_reqs, 100)
    assert (costs.plain_s(1, 0.0), costs.plain_s(4, 0.0)) == pytest.approx((1.0, 4.0))


@pytest.mark.parametrize(("num_new", "expected"), [(1, 3.0), (3, 4.5)])
def test_what_was_not_seen_for_long_counts_as_much_as_one_round_anew(num_new, expected):
    costs = RoundCosts(TABLES)
    plain(costs, 2.0, 4, 100)
    for _ in range(25):
        behind_draft(costs, 6.0, 4, 8)
    plain(costs, 6.0, 4, PLAIN_BEFORE + num_new)
    # Nothing counts for more than twice what was expected: 4, then 6, 6.
    assert costs.plain_s(4, 0.0) == pytest.approx(expected)


def test_one_quick_draft_behind_plain_rounds_is_soon_outweighed_by_slow_ones():
    """All that was known, the quick one at half of that at least, and three slow ones: a fifth each."""
    costs, levels = RoundCosts(TABLES), np.array([2])
    slow_s = 2.0 * float(costs.draft_s(4, levels)[0])
    for _ in range(100):
        behind_draft(costs, 6.0, 4, 8, draft=DraftTook(slow_s, 4, 2))
    assert costs.draft_s(4, levels) == pytest.approx(slow_s, rel=1e-3)
    plain(costs, 2.0, 4, 30)
    for seconds in (slow_s, 0.1 * slow_s, slow_s, slow_s, slow_s):  # the first one behind plain rounds does not count
        behind_draft(costs, 6.0, 4, 8, draft=DraftTook(seconds, 4, 2))
    assert costs.draft_s(4, levels) == pytest.approx(0.9 * slow_s, rel=0.02)


def test_an_interruption_is_not_a_cost():
    costs = RoundCosts(TABLES)
    for _ in range(30):
        behind_draft(costs, 6.0, 4, 8)
    behind_draft(costs, 1000.0, 4, 8)
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
        waits.observe(trees_s + 2.0, trees_s, 0.0)
    assert waits.scale == pytest.approx(1.0, abs=0.3)
    assert waits.offset_s == pytest.approx(2.0, abs=0.6)
