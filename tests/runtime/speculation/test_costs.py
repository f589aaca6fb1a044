"""Costs are interpolated between measurements and follow the rounds that really ran."""

from dataclasses import replace

import numpy as np
import pytest

from wingbeat.runtime.speculation.costs import CostTables, RoundCosts

TABLES = CostTables(
    batch_sizes=(1, 4),
    extra_nodes=(0, 2, 4),
    verify_s=((1.0, 1.2, 1.4), (2.0, 3.0, 5.0)),
    context_s=(0.001, 0.002),
    draft_base_s=(0.1, 0.2),
    draft_level_s=(0.05, 0.08),
)


def test_verify_interpolates_nodes_batch_and_context():
    costs = RoundCosts(TABLES)
    assert costs.verify_s(1, np.array([0, 1, 2, 3]), 0) == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert costs.verify_s(4, np.array([8, 16]), 0) == pytest.approx([3.0, 5.0])
    assert costs.verify_s(2, np.array([0, 4]), 0) == pytest.approx([4 / 3, 1.2 + (3.0 - 1.2) / 3])
    assert costs.verify_s(1, np.array([0]), 100) == pytest.approx([1.1])


def test_beyond_the_last_measurement_the_last_slope_goes_on():
    costs = RoundCosts(TABLES)
    assert costs.verify_s(1, np.array([6]), 0) == pytest.approx([1.6])
    assert costs.verify_s(8, np.array([0]), 0) == pytest.approx([2.0])


@pytest.mark.parametrize("num_reqs", [1, 3, 4])
def test_the_dense_form_equals_the_general_one(num_reqs):
    costs = RoundCosts(TABLES)
    for seconds, num_extra in ((1.6, 1), (2.9, 9)):
        costs.observe_verify(seconds, 1, num_extra, 0.0)
    costs.observe_verify(2.2, 1, 0, 0.0)
    for most in (2, 7, 20, 5):
        expected = costs.verify_s(num_reqs, np.arange(most + 1), 30.0)
        assert costs.verify_up_to_s(num_reqs, most, 30.0) == pytest.approx(expected)


def test_draft_interpolates_and_counts_levels():
    costs = RoundCosts(TABLES)
    assert costs.draft_s(1, np.array([0, 1, 4])) == pytest.approx([0.1, 0.15, 0.3])
    assert costs.draft_s(4, np.array([2])) == pytest.approx([0.36])
    assert costs.level_s(4) == pytest.approx(0.08)


def test_predictions_converge_to_what_rounds_take_and_shrug_off_interruptions():
    costs = RoundCosts(TABLES)
    for _ in range(200):
        costs.observe_verify(2.0, 1, 0, 0.0)
        costs.observe_verify(0.6, 1, 2, 0.0)
        costs.observe_draft(0.3, 1, 2)
    assert costs.verify_s(1, np.array([0, 2]), 0.0) == pytest.approx([2.0, 0.6], rel=0.03)
    assert costs.draft_s(1, np.array([2])) == pytest.approx([0.3], rel=0.03)
    costs.observe_verify(500.0, 1, 0, 0.0)
    assert costs.verify_s(1, np.array([0]), 0.0)[0] < 2.2


def test_what_slows_tree_rounds_down_is_expected_of_plain_ones_until_they_are_seen():
    costs = RoundCosts(TABLES)
    for _ in range(200):
        costs.observe_verify(2.2, 1, 2, 0.0)
    assert costs.verify_s(1, np.array([0]), 0.0)[0] > 1.5
    for _ in range(200):
        costs.observe_verify(1.0, 1, 0, 0.0)
    assert costs.verify_s(1, np.array([0]), 0.0) == pytest.approx([1.0], rel=0.01)


def test_rounds_of_different_sizes_tell_what_is_slow():
    """Dear roots and dear nodes are different things, and only the second one speaks against another node."""
    chance = np.random.default_rng(0)
    for true_least, true_added in ((1.5, 1.0), (1.0, 1.8), (0.8, 1.4)):
        costs = RoundCosts(TABLES)
        for _ in range(300):
            num_reqs, num_extra = (1, 4) if chance.random() < 0.5 else (4, int(chance.integers(4, 17)))
            plain, whole = (costs.tables.verify_s[num_reqs > 1][0], RoundCosts(TABLES).verify_s(num_reqs, num_extra, 0))
            seconds = true_least * plain + true_added * (float(whole) - plain)
            costs.observe_verify(seconds * chance.normal(1, 0.02), num_reqs, num_extra, 0.0)
        assert costs.tree_fit.factors[:2] == pytest.approx([true_least, true_added], rel=0.1)


def test_padding_costs_what_packed_rounds_take_beyond_their_rows():
    """A padded node takes part in attention alone: a share of what a real one takes."""
    for share in (0.1, 0.5):
        chance = np.random.default_rng(0)
        costs, table = RoundCosts(replace(TABLES, padding_share=0.3)), RoundCosts(TABLES)
        assert costs.padding_share == 0.3
        for _ in range(300):
            rows, padded = sorted(chance.integers(4, 17, 2).tolist())
            by_rows, by_padded = table.verify_s(4, np.array([rows, padded]), 0.0)
            costs.observe_verify(by_rows + share * (by_padded - by_rows), 4, rows, 0.0, num_padding=padded - rows)
        assert costs.padding_share == pytest.approx(share, abs=0.05)
        assert costs.verify_s(4, np.array([8]), 0.0) == pytest.approx(table.verify_s(4, np.array([8]), 0.0), rel=0.05)


def test_prompt_chunks_are_no_cost_of_the_round_they_ride_in():
    """Under load no round is without one, and each of them corrects what is thought of roots, nodes and levels."""
    chance = np.random.default_rng(0)
    costs, measured = RoundCosts(TABLES), RoundCosts(TABLES)
    for _ in range(300):
        num_extra, levels, num_chunk_tokens = (int(chance.integers(*ends)) for ends in ((1, 17), (1, 5), (0, 40)))
        slow_s = 1.8 * float(measured.verify_s(4, num_extra, 0.0)) + 0.3 * num_chunk_tokens
        costs.observe_verify(slow_s, 4, num_extra, 0.0, num_chunk_tokens=num_chunk_tokens)
        costs.observe_verify(1.5 * 2.0 + 0.3 * num_chunk_tokens, 4, 0, 0.0, num_chunk_tokens=num_chunk_tokens)
        drafted_s = 1.4 * float(measured.draft_s(4, levels)) + 0.02 * num_chunk_tokens
        costs.observe_draft(drafted_s, 4, levels, num_chunk_tokens)
    assert costs.verify_s(4, np.array([8, 16]), 0.0) == pytest.approx([1.8 * 3.0, 1.8 * 5.0], rel=0.1)
    assert costs.verify_s(4, np.array([0]), 0.0) == pytest.approx([1.5 * 2.0], rel=0.1)
    assert costs.draft_s(4, np.array([1, 4])) == pytest.approx([1.4 * 0.28, 1.4 * 0.52], rel=0.1)


def test_tables_refuse_other_shapes():
    with pytest.raises(ValueError, match="extra_nodes"):
        replace(TABLES, verify_s=((1.0,), (2.0,)))
    with pytest.raises(ValueError, match="batch size"):
        replace(TABLES, context_s=(1.0,))


def test_prompts_are_counted_by_new_token():
    costs = RoundCosts(TABLES)
    assert costs.context_s() == 0.0
    for _ in range(2000):
        costs.observe_prompts(30, 10)
    for _ in range(100):
        costs.observe_draft(0.5, 4, 2.0, 30)
    assert costs.context_s() == pytest.approx(3.0 * costs.draft_fit.factors[2] * costs._draft_chunk_token_s)
    assert costs.context_s() > 0


def test_host_times_are_those_of_rounds_without_prompts():
    costs = RoundCosts(TABLES)
    assert 0 < costs.host_s(drafting=False) < costs.host_s(drafting=True), "before anything was seen"
    for number in range(60):
        with_prompts = number % 2 == 0
        costs.observe_host(0.002 + 0.003 * with_prompts, False, with_prompts)
        costs.observe_publish(0.0, False, with_prompts)
        seen = costs.host_s(drafting=False)
    assert seen == pytest.approx(0.002, rel=0.1)


def test_the_first_round_of_all_is_soon_outweighed():
    costs = RoundCosts(TABLES)
    for seconds in (0.040, *[0.002] * 10):
        costs.observe_host(seconds, with_tree=True)
        costs.observe_publish(0.0, asked=True)
    assert costs.host_s(drafting=True) == pytest.approx(0.002, rel=0.15)


def test_telling_the_drafter_is_part_of_what_was_asked_for():
    """A plain round among drafted ones asks for trees: that is no cost of decoding plainly."""
    costs = RoundCosts(TABLES)
    plain_s = costs.host_s(drafting=False)
    while costs.host_s(drafting=True) < 0.005:
        costs.observe_publish(0.005, asked=True)
    assert costs.host_s(drafting=False) == plain_s
    while costs.host_s(drafting=False) < 0.003:
        costs.observe_publish(0.003, asked=False)
