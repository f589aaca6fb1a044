"""A draft ends where its verifier's rule says that another level does not pay."""

import numpy as np
import pytest
import torch

from wingbeat.runtime.adaptive.adaptive_speculation import AdaptiveSpeculation
from wingbeat.runtime.adaptive.growth_rule import AcceptanceRule, growth_rule
from wingbeat.runtime.adaptive.policy import GrowthLimits
from wingbeat.runtime.config import NUM_BINS
from wingbeat.runtime.engine.speculation import DraftPlan, Reason
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, RoundHeader, outcome_layout

SURE, HOPELESS = np.log(0.98), np.log(0.02)


def rule(min_reach, price=0.0, table=0.5, num_reqs=1):
    return AcceptanceRule(GrowthLimits(min_reach, price), np.broadcast_to(table, (num_reqs, NUM_BINS)))


@pytest.mark.parametrize("num_reqs", [1, 3])
@pytest.mark.parametrize(
    ("price", "expected"), [(0.0, [True, True, False]), (0.1, [True, False, False]), (0.6, [False, False, False])]
)
def test_growth_stops_where_the_reach_falls_below_the_rule(num_reqs, price, expected):
    log_probs, chosen = np.full((num_reqs, 1, 1), -1.0), np.zeros((num_reqs, 1), np.int64)
    # Summed reach at depth d is num_reqs * 0.5**d, and num_reqs * price below that.
    subject = rule(0.2 * num_reqs, price, num_reqs=num_reqs)
    assert [subject.pays(log_probs, chosen) for _ in range(3)] == expected


def test_requests_that_are_not_worth_a_node_do_not_stand_in_for_those_that_are():
    table = np.linspace(0.05, 0.95, NUM_BINS)
    assert rule(0.5, 0.2, table).pays(np.array([[[SURE]]]), np.zeros((1, 1), np.int64))
    hopeless = np.full((10, 1, 1), HOPELESS)
    assert not rule(0.5, 0.2, table, 10).pays(hopeless, np.zeros((10, 1), np.int64))


def test_growth_of_a_tree_follows_the_chosen_nodes():
    subject = rule(0.5, table=np.linspace(0.05, 0.95, NUM_BINS))
    assert subject.pays(np.array([[[SURE, HOPELESS]]]), np.array([[0, 1]]))
    # Level 2: only children of the second, unlikely node are kept.
    assert not subject.pays(np.array([[[SURE, HOPELESS], [SURE, HOPELESS]]]), np.array([[2, 3]]))


def test_what_a_verifier_writes_is_what_its_drafter_judges_by():
    spec = ChannelSpec(2, 5, 5, 8, 0, 64, 8, 8, 16)
    outcome = Outcome(*(torch.zeros(shape, dtype=dtype) for shape, dtype in outcome_layout(spec).values()))
    subject = AdaptiveSpeculation(None, None)
    subject.acceptance.table = np.stack([np.full(NUM_BINS, 0.9), np.full(NUM_BINS, 0.2)])
    outcome.proposal_slots[:2] = torch.tensor([1, 0])
    outcome.temperatures[1] = 0.7
    assert subject.write_rule(DraftPlan(3, Reason.PROBE_DRAFT), outcome, 0) == 0
    assert growth_rule(outcome, RoundHeader(num_proposals=2)) is None
    log_probs, chosen = np.full((2, 1, 1), -1.0), np.zeros((2, 1), np.int64)
    for min_reach, pays in ((0.7, True), (0.9, False)):  # 0.9 - 0.1, and 0.2 - 0.1 for the sampled one
        plan = DraftPlan(3, Reason.SPECULATE, None, GrowthLimits(min_reach, 0.1))
        header = RoundHeader(num_proposals=2, has_rule=subject.write_rule(plan, outcome, 0))
        assert growth_rule(outcome, header).pays(log_probs, chosen) == pays
