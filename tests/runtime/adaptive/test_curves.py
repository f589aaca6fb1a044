"""Costs are the curves, and come to what rounds really take."""

import numpy as np
import pytest

from wingbeat.runtime.adaptive.curves import DraftCurve, DraftTook, Factor, PassCurve, RoundCosts, RoundTook

PASSES = PassCurve((1, 4, 16), (1.0, 2.0, 8.0), (0.001, 0.0005))
DRAFTS = DraftCurve((1, 5), (0.1, 0.3), (0.1, 0.5), 0.0001)
NO_TREES = DraftTook(0.0, 0, 0)


def behind_draft(costs, seconds, num_reqs, num_extra, num_chunk_tokens=0, draft=NO_TREES):
    costs.observe(RoundTook(seconds, num_reqs, num_extra, 0.0, num_chunk_tokens, draft))


def plain(costs, seconds, num_reqs, count, num_chunk_tokens=0):
    for _ in range(count):
        costs.observe(RoundTook(seconds, num_reqs, 0, 0.0, num_chunk_tokens))


def test_passes_go_straight_between_points_and_on_beyond_them():
    costs = RoundCosts(PASSES, DRAFTS)
    assert costs.verify_s(1, np.array([0, 1, 3, 15, 17]), 0.0) == pytest.approx([1.0, 4 / 3, 2.0, 8.0, 9.0])
    assert costs.plain_s(4, 0.0) == pytest.approx(2.0)


def test_a_verified_row_reads_the_context_as_a_root_does():
    costs = RoundCosts(PASSES, DRAFTS)
    assert costs.plain_s(4, 1000.0) == pytest.approx(2.0 + 4.0)
    assert costs.verify_s(4, np.array([12]), 1000.0) == pytest.approx([8.0 + 4.0 + 6.0])


def test_a_level_of_a_draft_takes_the_longer_the_more_sequences_and_the_more_context():
    costs = RoundCosts(PASSES, DRAFTS)
    assert costs.draft_s(1, np.array([0, 3]), 0.0) == pytest.approx([0.1, 0.4])
    assert costs.draft_s(3, np.array([3]), 0.0) == pytest.approx([0.2 + 3 * 0.3])
    assert costs.draft_s(3, np.array([3]), 1000.0) == pytest.approx([0.2 + 3 * (0.3 + 0.3)])


def test_phases_are_shown_at_powers_of_two_of_the_requests():
    shown = RoundCosts(PASSES, DRAFTS).by_batch(3, 5)
    assert {phase: list(by_batch) for phase, by_batch in shown.items()} == {phase: [1, 2, 4] for phase in shown}
    assert (shown["plain"][4], shown["draft"][1], shown["verify"][1]) == pytest.approx((2.0, 0.4, 2.5))


@pytest.mark.parametrize("num_chunk_tokens", [0, 2])
def test_predictions_come_to_what_rounds_take_each_part_by_itself(num_chunk_tokens):
    costs = RoundCosts(PASSES, DRAFTS)
    chunks_s = num_chunk_tokens * 7 / 15
    draft = DraftTook(3.0 * (0.25 + 3 * 0.4 + num_chunk_tokens * 0.1), 4, 3, num_chunk_tokens)
    for _ in range(100):
        behind_draft(costs, 1.5 * (6.0 + chunks_s), 4, 8, num_chunk_tokens, draft)
    plain(costs, 0.8 * (2.0 + chunks_s), 4, 100, num_chunk_tokens)
    assert costs.plain_s(4, 0.0) == pytest.approx(1.6)
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([9.0])
    assert costs.draft_s(4, np.array([3]), 0.0) == pytest.approx([4.35])


def test_what_slows_passes_of_trees_down_is_expected_of_plain_ones_until_one_is_seen():
    costs = RoundCosts(PASSES, DRAFTS)
    behind_draft(costs, 12.0, 4, 8)
    behind_draft(costs, 12.0, 4, 8)
    assert costs.plain_s(4, 0.0) == pytest.approx(4.0)
    plain(costs, 2.2, 4, 2)
    assert costs.plain_s(4, 0.0) == pytest.approx(2.2)
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([12.0])


def test_rounds_around_a_draft_say_nothing_of_plain_rounds():
    """They tell the drafter, plan anew and find the caches of another: 5 s where a plain round takes 2."""
    costs = RoundCosts(PASSES, DRAFTS)
    for _ in range(20):
        behind_draft(costs, 5.0, 4, 0)
        plain(costs, 5.0, 4, 1)
        plain(costs, 2.0, 4, 3)
        costs.observe(RoundTook(5.0, 4, 0, 0.0, asks=True))
    assert costs.plain_s(4, 0.0) == pytest.approx(2.0)


def test_the_first_draft_behind_plain_rounds_says_nothing_of_those_that_follow_one_another():
    """The first draft also takes in the context that was kept back: 9 s for a round, and as long for its trees."""
    costs = RoundCosts(PASSES, DRAFTS)
    for _ in range(20):
        plain(costs, 2.0, 4, 30)
        behind_draft(costs, 9.0, 4, 8, draft=DraftTook(9.0, 4, 3, 30))
        behind_draft(costs, 6.0, 4, 8, draft=DraftTook(1.45, 4, 3))
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([6.0])
    assert costs.draft_s(4, np.array([3]), 0.0) == pytest.approx([1.45])


def test_plain_rounds_of_one_load_say_nothing_of_another_once_that_was_seen():
    costs = RoundCosts(PASSES, DRAFTS)
    plain(costs, 3.0, 1, 100)
    assert costs.plain_s(4, 0.0) == pytest.approx(6.0), "the nearest load that was seen"
    plain(costs, 2.5, 4, 100)
    assert (costs.plain_s(1, 0.0), costs.plain_s(4, 0.0)) == pytest.approx((3.0, 2.5))


def test_the_longer_a_round_is_ago_the_less_it_counts():
    recent, long_ago = Factor(), Factor()
    for subject, pause in ((recent, 1), (long_ago, 100)):
        for number in range(100):
            subject.observe(1.0, number)
        subject.observe(2.0, 99 + pause)
    assert recent.value < 1.06
    assert long_ago.value > 1.6


def test_trees_that_had_come_before_they_were_waited_for_cost_something_all_the_same():
    subject = Factor()
    for number in range(3):
        subject.observe(0.0, number)
    assert subject.value > 0.05
    for number in range(3, 40):
        subject.observe(1.0, number)
    assert subject.value > 0.5


def test_an_interruption_is_not_a_cost():
    costs = RoundCosts(PASSES, DRAFTS)
    for _ in range(30):
        behind_draft(costs, 6.0, 4, 8)
    behind_draft(costs, 1000.0, 4, 8)
    assert costs.verify_s(4, np.array([8]), 0.0)[0] < 6.0 * 1.06


def test_doubt_is_the_standard_error_of_what_was_seen():
    numbers = np.random.default_rng(0)
    means = []
    for _ in range(400):
        subject = Factor()
        for number in range(300):
            subject.observe(float(numbers.normal(1.0, 0.2)), number)
        means.append(subject.value)
    assert np.std(means) < subject.doubt < 2 * np.std(means)
    assert RoundCosts(PASSES, DRAFTS).doubt(4) == 0.0
