"""A draft ends where its verifier's rule says that another level does not pay."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, RoundHeader, outcome_layout
from wingbeat.runtime.speculation.acceptance import NUM_BINS, AcceptanceTracker
from wingbeat.runtime.speculation.growth_rule import GrowthRule, RuleTables
from wingbeat.runtime.speculation.policy import DraftPlan

MAX_DEPTH = 4


def rule(min_reach, node_price=0.0, by_confidence=0.5, depth_factors=1.0, request_factors=(1.0,), sampled=None):
    """A rule for as many requests as there are factors; scalars stand for every depth or bin."""

    def by_depth(values):
        return np.broadcast_to(values, MAX_DEPTH + 1).tolist()

    tables = RuleTables(
        1,
        by_depth(min_reach),
        by_depth(node_price),
        np.broadcast_to(by_confidence, (2, NUM_BINS)).tolist(),
        by_depth(depth_factors),
        list(request_factors),
    )
    num_reqs = len(request_factors)
    return GrowthRule(tables, list(range(num_reqs)), [False] * num_reqs if sampled is None else sampled)


@pytest.mark.parametrize("num_reqs", [1, 3])
def test_growth_stops_where_the_reach_falls_below_the_rule(num_reqs):
    log_probs, chosen = np.full((num_reqs, 1, 1), -1.0), np.zeros((num_reqs, 1), np.int64)
    # Summed reach at depth d is num_reqs * 0.5**d, and num_reqs * price below that.
    for price, expected in ((0.0, [True, True, False]), (0.1, [True, False, False]), (0.6, [False, False, False])):
        subject = rule(0.2 * num_reqs, price, request_factors=[1.0] * num_reqs)
        assert [subject.pays(log_probs, chosen, depth) for depth in (1, 2, 3)] == expected


def test_requests_that_are_not_worth_a_node_do_not_stand_in_for_those_that_are():
    """One sure chain is worth a level where ten hopeless ones of the same reach in all are not."""

    def pays(factors):
        return rule(0.5, 0.2, 0.9, request_factors=factors).pays_for_chains([-1.0] * len(factors), 1)

    assert pays([1.0])
    assert not pays([0.1] * 10)


def test_growth_of_a_tree_follows_the_chosen_nodes():
    subject = rule(0.5, by_confidence=np.linspace(0.05, 0.95, NUM_BINS))
    good, bad = np.log(0.98), np.log(0.02)
    assert subject.pays(np.array([[[good, bad]]]), np.array([[0, 1]]), 1)
    # Level 2: only children of the second, unlikely node are kept.
    assert not subject.pays(np.array([[[good, bad], [good, bad]]]), np.array([[2, 3]]), 2)


@pytest.mark.parametrize("num_reqs", [1, 4])
def test_the_rule_for_chains_is_the_rule(num_reqs):
    chance = np.random.default_rng(5)
    by_confidence = chance.random((2, NUM_BINS))
    depth_factors = chance.uniform(0.5, 1.2, MAX_DEPTH + 1)
    answers = set()
    for _ in range(40):
        reach = chance.uniform(0, 0.4 * num_reqs, MAX_DEPTH + 1)
        prices = chance.uniform(0, 0.3, MAX_DEPTH + 1)
        factors = chance.uniform(0.5, 1.2, num_reqs).tolist()
        rest = (prices, by_confidence, depth_factors, factors, (chance.random(num_reqs) < 0.5).tolist())
        chains, general = rule(reach, *rest), rule(reach, *rest)
        for depth in range(1, MAX_DEPTH):
            log_probs = np.log(chance.random(num_reqs))
            answer = general.pays(log_probs[:, None, None], np.zeros((num_reqs, 1), np.int64), depth)
            assert chains.pays_for_chains(log_probs.tolist(), depth) == answer
            answers.add(answer)
    assert answers == {True, False}


def test_tables_are_read_once_for_each_number():
    outcome = Outcome(*[torch.zeros(8, dtype=torch.int64)] + [torch.zeros(3) for _ in Outcome._fields[1:]])
    assert not RuleTables.read(outcome).number
    RoundHeader(rule_number=5).write(outcome.header)
    outcome.min_reach[:] = 0.25
    first = RuleTables.read(outcome)
    outcome.min_reach[:] = 0.5
    assert RuleTables.read(outcome, first) is first
    assert first.min_reach == [0.25] * 3
    RoundHeader(rule_number=6).write(outcome.header)
    assert RuleTables.read(outcome, first).min_reach == [0.5] * 3


def test_what_a_verifier_writes_is_what_its_drafter_reads():
    """Into whichever buffer, whenever plan or tables have changed, and anew once other buffers are in place."""
    spec = ChannelSpec(2, MAX_DEPTH + 1, MAX_DEPTH + 1, 8, 0, 64, 8, 8, 16)
    layout = outcome_layout(spec).values()
    buffers = [Outcome(*[torch.zeros(shape, dtype=dtype) for shape, dtype in layout]) for _ in range(2)]
    tracker = AcceptanceTracker(spec.num_slots, MAX_DEPTH)
    subject = AdaptiveSpeculation(SimpleNamespace(tracker=tracker, num_nodes=spec.num_nodes, max_depth=MAX_DEPTH))
    reach, price = (np.full(MAX_DEPTH + 1, value, dtype=np.float32) for value in (0.5, 0.25))
    plan, other = (DraftPlan(3, "pays", values, price) for values in (reach, 2 * reach))

    def arrives(plan, buffer):
        number = subject.write_rule(plan, buffer, 0)
        RoundHeader(rule_number=number).write(buffer.header)
        tables = RuleTables.read(buffer)
        assert tables.min_reach == plan.min_reach.tolist()
        assert tables.node_price == price.tolist()
        assert tables.by_confidence == pytest.approx(tracker.table, rel=1e-6)
        assert tables.request_factors == pytest.approx(tracker.request_factors)
        return number

    assert arrives(plan, buffers[0]) == arrives(plan, buffers[1]) == 1
    seen = np.ones((1, 2), dtype=bool)
    tracker.record(np.zeros((1, 2)), np.array([[0, 1]]), seen[:, 0], np.array([1]), seen, seen)
    assert arrives(plan, buffers[1]) == arrives(plan, buffers[0]) == 2
    assert arrives(other, buffers[0]) == 3
    for field in buffers[0]:
        field.zero_()
    subject.calibrate(None, 0.0)
    assert arrives(other, buffers[0]) == 3
    assert subject.write_rule(DraftPlan(3, "explores"), buffers[0], 0) == 0
