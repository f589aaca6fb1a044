"""Costs are the curves, and come to what rounds really take."""

import numpy as np
import pytest

from wingbeat.runtime.adaptive.curves import (
    FORGOTTEN_ROUNDS,
    DraftCurve,
    DraftTook,
    Overhead,
    PassCurve,
    RoundCosts,
    RoundTook,
)

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


def test_predictions_come_to_what_rounds_take_each_part_by_itself():
    costs = RoundCosts(PASSES, DRAFTS)
    draft = DraftTook(3.0 + 0.25 + 3 * 0.4, 4, 3)
    for _ in range(100):
        behind_draft(costs, 1.5 + 6.0, 4, 8, draft=draft)
    plain(costs, 2.0 - 0.4, 4, 100)
    assert costs.plain_s(4, 0.0) == pytest.approx(1.6)
    assert costs.verify_s(4, np.array([0, 8]), 0.0) == pytest.approx([3.5, 7.5])
    assert costs.draft_s(4, np.array([3]), 0.0) == pytest.approx([4.45])


def test_rounds_with_prompts_and_those_behind_them_are_no_evidence():
    """A prompt of hundreds of rows costs more or less than the curve says by more than a round's whole overhead."""
    costs = RoundCosts(PASSES, DRAFTS)
    for _ in range(20):
        plain(costs, 2.5, 4, 4)
        plain(costs, 99.0, 4, 1, num_chunk_tokens=200)
        plain(costs, 5.0, 4, 1)
    assert costs.plain_s(4, 0.0) == pytest.approx(2.5)


def test_what_slows_passes_of_trees_down_is_expected_of_plain_ones_until_one_is_seen():
    costs = RoundCosts(PASSES, DRAFTS)
    behind_draft(costs, 8.0, 4, 8)
    behind_draft(costs, 8.0, 4, 8)
    assert costs.plain_s(4, 0.0) == pytest.approx(4.0)
    plain(costs, 2.2, 4, 2)
    assert costs.plain_s(4, 0.0) == pytest.approx(2.2)
    assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx([8.0])


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
    assert costs.plain_s(4, 0.0) == pytest.approx(4.0), "the nearest load that was seen"
    plain(costs, 2.5, 4, 100)
    assert (costs.plain_s(1, 0.0), costs.plain_s(4, 0.0)) == pytest.approx((3.0, 2.5))


def test_a_lucky_probe_changes_little_unless_the_others_were_long_ago():
    """A probe of plain decoding is a round in dozens, and rounds of one size differ by half."""
    for rounds, least, most in ((64, 1.95, 2.0), (4096, 1.2, 1.4)):
        costs = RoundCosts(PASSES, DRAFTS)
        plain(costs, 2.0, 4, 100)
        for _ in range(rounds):
            behind_draft(costs, 6.0, 4, 8)
        plain(costs, 1.2, 4, 2)
        assert least < costs.plain_s(4, 0.0) < most


def test_more_nodes_cost_what_the_curve_says_however_much_there_is_around_a_pass():
    """Messages and the drafter's work take as long for a small tree as for a large one."""
    costs = RoundCosts(PASSES, DRAFTS)
    for _ in range(100):
        behind_draft(costs, 4.0 + 2.0 + 0.5, 4, 1)
    few_s, many_s = costs.verify_s(4, np.array([1, 5]), 0.0)
    assert (few_s, many_s - few_s) == pytest.approx((6.5, 2.0))


def test_an_overhead_never_makes_work_free():
    costs = RoundCosts(PASSES, DRAFTS)
    plain(costs, 1.0, 16, 100)
    assert costs.plain_s(9, 0.0) == pytest.approx(4.5 / 10)


def test_trees_that_had_come_before_they_were_waited_for_cost_something_all_the_same():
    subject = Overhead()
    for number in range(3):
        subject.observe(0.0, 1.0, number)
    assert subject.value > -0.95
    for number in range(3, 43):
        subject.observe(1.0, 1.0, number)
    assert subject.value > -0.2


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
        subject = Overhead()
        for number in range(300):
            subject.observe(float(numbers.normal(1.0, 0.2)), 0.5, number)
        means.append(subject.value)
    assert np.std(means) < subject.doubt_s < 2 * np.std(means)
    assert RoundCosts(PASSES, DRAFTS).doubt(4, 1.0, 2.0) == 0.0


def test_doubt_is_relative_to_a_round_of_its_kind():
    costs, numbers = RoundCosts(PASSES, DRAFTS), np.random.default_rng(0)
    for _ in range(100):
        behind_draft(costs, float(numbers.normal(6.0, 0.5)), 4, 8)
    plain(costs, 1.0, 4, 100)
    assert costs.doubt(4, 1.0, 6.0) == pytest.approx(costs._verify.nearest(4).doubt_s / 6.0)


@pytest.mark.parametrize("seed", range(8))
def test_an_overhead_lies_between_the_differences_that_were_measured(seed):
    """Also where passes of different sizes share it, of which the curve prices some far too high."""
    rng = np.random.default_rng(seed)
    subject, lowest, highest = Overhead(), np.inf, -np.inf
    for now in range(4000):
        predicted_s = float(10 ** rng.uniform(-4, -1))
        seconds = predicted_s * float(10 ** rng.uniform(-2, 1))
        lowest, highest = min(lowest, -predicted_s), max(highest, seconds)
        subject.observe(seconds, predicted_s, now)
        assert lowest <= subject.value <= highest
        assert 0 < subject.added_to(predicted_s) < np.inf
        assert 0 <= subject.doubt_s <= highest - lowest


@pytest.mark.parametrize(("curve", "row_s"), [(((1, 4, 12), (4.0, 5.0, 9.0)), 0.5), (((1,), (4.0,)), 0.0)])
def test_a_replayed_context_takes_what_rows_beyond_the_curve_add(curve, row_s):
    costs = RoundCosts(PassCurve(*curve), DRAFTS)
    assert costs.replay_s(100) == pytest.approx(100 * row_s)


def test_text_trees_that_were_slow_long_ago_are_priced_as_if_they_had_not_been_measured():
    costs = RoundCosts(PASSES, DRAFTS)
    plain(costs, 2.0, 4, 2)
    costs.observe(RoundTook(40.0, 4, 8, 0.0))
    few_s = costs.text_s(4, np.array([8]), 0.0)
    plain(costs, 2.0, 4, FORGOTTEN_ROUNDS - 1)
    assert costs.text_s(4, np.array([8]), 0.0) == pytest.approx(few_s, rel=0.01)
    plain(costs, 2.0, 4, 2)
    assert costs.text_s(4, np.array([8]), 0.0) < few_s / 2
