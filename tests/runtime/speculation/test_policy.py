"""The policy never speculates where the cost model says that it loses, and values more what is accepted more."""

import itertools

import numpy as np
import pytest

from wingbeat.runtime.speculation import chain_cutting
from wingbeat.runtime.speculation.acceptance import AcceptanceTracker, path_probabilities
from wingbeat.runtime.speculation.chain_cutting import TokenCosts, cut_chains
from wingbeat.runtime.speculation.costs import CostTables, RoundCosts
from wingbeat.runtime.speculation.padding import worth_packing
from wingbeat.runtime.speculation.policy import SpeculationPolicy

pytestmark = pytest.mark.few(6)

DEPTH = 6
BATCHES = (1, 8, 64)


def policy(level_s=0.3, node_s=0.05, base_s=0.2, num_nodes=DEPTH + 1):
    """Costs linear in everything: a plain step of B sequences takes 4 + 0.1 B, each node `node_s` more."""
    extra = (0, 1, num_nodes - 1)
    tables = CostTables(
        batch_sizes=BATCHES,
        extra_nodes=extra,
        verify_s=tuple(tuple(4 + 0.1 * b + node_s * b * e for e in extra) for b in BATCHES),
        context_s=(0.0,) * len(BATCHES),
        draft_base_s=(base_s,) * len(BATCHES),
        draft_level_s=(level_s,) * len(BATCHES),
    )
    return SpeculationPolicy(RoundCosts(tables), AcceptanceTracker(64, DEPTH), DEPTH, num_nodes)


def show_chains(subject, acceptance, rounds=400, num_trees=1):
    """Chains whose every node is accepted with this probability, as far as the policy lets them grow."""
    for _ in range(rounds):
        subject.plan(num_trees, num_trees, 100.0)
        subject._now.limit = DEPTH
        path = np.tile(acceptance ** np.arange(DEPTH + 1.0), (num_trees, 1))
        real = np.tile(np.arange(DEPTH + 1) > 0, (num_trees, 1))
        depths = np.tile(np.arange(DEPTH + 1), (num_trees, 1))
        subject.observe_trees(path, real, depths, real)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("level_s", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("node_s", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_never_speculates_where_the_model_says_it_loses(acceptance, level_s, node_s, batch):
    subject = policy(level_s, node_s)
    show_chains(subject, acceptance)
    rates = subject.rates(batch, batch, 100.0)
    plan = subject.plan(batch, batch, 100.0)
    if plan.levels and plan.reason != "trial":
        assert rates.max() > rates[0]
    # By hand: tokens over seconds of every depth.
    tokens = batch * np.cumsum(np.append(1.0, acceptance ** np.arange(1.0, DEPTH + 1)))
    depth = np.arange(DEPTH + 1)
    seconds = 4 + 0.1 * batch + node_s * batch * depth + np.where(depth > 0, 0.2 + level_s * depth, 0.0)
    assert rates == pytest.approx(tokens / seconds, rel=0.02)


def test_speculation_is_monotone_in_acceptance():
    depths = []
    for acceptance in (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97):
        subject = policy(level_s=0.5, node_s=0.1)
        show_chains(subject, acceptance)
        depths.append(int(subject.rates(1, 1, 100.0).argmax()))
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (0, DEPTH)


def test_plain_decoding_is_tried_against_now_and_then_and_less_and_less():
    subject = policy(level_s=8.0)
    show_chains(subject, 0.1)
    plans = [subject.plan(1, 1, 100.0) for _ in range(4000)]
    drafted = np.array([bool(plan.levels) for plan in plans])
    assert {plan.reason for plan in plans} == {"trial", "plain decoding is faster"}
    begun = np.flatnonzero(np.diff(drafted.astype(int)) == 1)
    assert len(begun) >= 3
    assert (np.diff(begun, 2) >= 0).all()
    assert drafted.mean() < 0.03


def test_a_trial_that_pays_brings_speculation_back():
    subject = policy()
    show_chains(subject, 0.02)
    while subject.plan(1, 1, 100.0).reason != "trial":
        pass
    for _ in range(400):
        if subject.plan(1, 1, 100.0).levels:
            path = 0.95 ** np.arange(DEPTH + 1.0)[None]
            depths = np.arange(DEPTH + 1)[None]
            subject.observe_trees(path, depths > 0, depths, depths > 0)
    assert subject.plan(1, 1, 100.0).reason == "pays"


def test_a_drafter_that_stops_by_itself_may_always_go_to_the_end():
    subject = policy(level_s=0.5, node_s=0.2)
    subject.stops_early = True
    show_chains(subject, 0.6)
    assert 0 < int(subject.rates(1, 1, 100.0).argmax()) < DEPTH
    assert subject.plan(1, 1, 100.0).levels == DEPTH


def test_nothing_is_drafted_for_nobody():
    plan = policy().plan(4, 0, 100.0)
    assert plan.levels == 0


@pytest.mark.parametrize("node_s", [0.0, 0.02, 0.2, 3.0])
def test_nodes_are_shared_out_by_joint_probability(node_s, monkeypatch):
    monkeypatch.setattr(RoundCosts, "padding_share", 0.0)
    subject = policy(node_s=node_s)
    show_chains(subject, 0.8)
    subject.plan(8, 8, 100.0)
    chance = np.random.default_rng(0)
    conditional = chance.uniform(0.2, 0.95, (8, DEPTH + 1))
    path = np.cumprod(conditional, axis=1)
    real = np.tile(np.arange(DEPTH + 1) > 0, (8, 1))
    real[3, 4:] = False
    kept = subject.choose_nodes(path, real, 8, 100.0)
    assert not (kept & ~real).any()
    if kept.any() and (real & ~kept).any():
        assert path[kept].min() >= path[real & ~kept].max()
    assert (kept[:, 2:] <= kept[:, 1:-1]).all()
    count = int(kept.sum())
    order = np.sort(path[real])[::-1]
    value = [order[:n].sum() - (4.8 + node_s * n) / subject._now.token_s for n in range(len(order) + 1)]
    assert value[count] == pytest.approx(max(value))


@pytest.mark.parametrize("num_reqs", [1, 3])
@pytest.mark.parametrize("node_s", [0.0, 0.1, 0.6, 3.0])
def test_chains_are_cut_where_choose_nodes_cuts_them(node_s, num_reqs, monkeypatch):
    monkeypatch.setattr(chain_cutting, "worth_packing", lambda num_rows, num_padded: True)
    monkeypatch.setattr(RoundCosts, "padding_share", 0.0)
    subject = policy(node_s=node_s)
    show_chains(subject, 0.8, num_trees=num_reqs)
    subject.plan(num_reqs, num_reqs, 100.0)
    chance = np.random.default_rng(1)
    parents = np.tile(np.arange(DEPTH + 1) - 1, (num_reqs, 1))
    slots = np.arange(num_reqs)
    for _ in range(20):
        lens = chance.integers(1, DEPTH + 2, num_reqs)
        scores = np.pad(np.log(chance.uniform(0.01, 0.9, (num_reqs, DEPTH))).cumsum(axis=1), ((0, 0), (1, 0)))
        log_probs = np.diff(scores, prepend=0.0)
        sampled = chance.random(num_reqs) < 0.5
        real = (parents >= 0) & (np.arange(DEPTH + 1) < lens[:, None])
        given = subject.conditional(log_probs, parents + 1, sampled, slots)
        kept = subject.choose_nodes(path_probabilities(given, parents, DEPTH), real, num_reqs, 100.0)
        chains = [row[:count].tolist() for row, count in zip(scores, lens, strict=True)]
        assert subject.cut_chains(chains, sampled.tolist(), slots.tolist(), 100.0) == kept.sum(axis=1).tolist()


def test_dear_padding_levels_chains(monkeypatch):
    """Where padding costs what nodes cost, chains of one length are best; where it is free, the likeliest nodes are."""
    num_packed = []
    for share in (0.0, 0.5, 1.0):
        monkeypatch.setattr(RoundCosts, "padding_share", share)
        chance = np.random.default_rng(2)
        subject = policy(node_s=0.2)
        show_chains(subject, 0.8, num_trees=4)
        subject.plan(4, 4, 100.0)
        packed = 0
        for _ in range(30):
            scores = np.pad(np.log(chance.uniform(0.01, 0.9, (4, DEPTH))).cumsum(axis=1), ((0, 0), (1, 0)))
            kept = subject.cut_chains(scores.tolist(), [False] * 4, [0, 1, 2, 3], 100.0)
            packed += worth_packing(4 + sum(kept), 4 * (1 + max(kept)))
        num_packed.append(packed)
    assert num_packed[0] > num_packed[1] > num_packed[2] == 0


def chains_to_cut(chance):
    """Path probabilities of one to three chains of up to three nodes, at least one of which is no bare root."""
    while True:
        num_chains = int(chance.integers(1, 4))
        paths = [chance.uniform(0.1, 0.95, chance.integers(0, 4)).cumprod().tolist() for _ in range(num_chains)]
        if any(paths):
            return paths


def value_of(kept, paths, costs, packs=worth_packing):
    """Tokens that verifying so many nodes of each chain is expected to bring, less those its time could bring."""
    num_reqs, longest = len(paths), max(kept)
    gain = sum(sum(path[:count]) for path, count in zip(paths, kept, strict=True))
    if not longest:
        return -costs.nodes[0]
    padded = costs.nodes[num_reqs * longest]
    if not packs(num_reqs + sum(kept), num_reqs * (1 + longest)):
        return gain - padded
    return gain - (1 - costs.padding) * costs.nodes[sum(kept)] - costs.padding * padded


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_chains_are_cut_to_the_best_there_is(share, monkeypatch):
    """Against every choice there is, where each node costs the same and any padding can be taken out."""
    monkeypatch.setattr(chain_cutting, "worth_packing", lambda num_rows, num_padded: True)
    chance = np.random.default_rng(3)
    for _ in range(40):
        paths = chains_to_cut(chance)
        nodes = chance.uniform(0.0, 0.5) + chance.uniform(0.02, 0.3) * np.arange(len(paths) * 3 + 1)
        costs = TokenCosts([0.0, *nodes[1:]], share)
        choices = itertools.product(*(range(len(path) + 1) for path in paths))
        best = max(value_of(kept, paths, costs, chain_cutting.worth_packing) for kept in choices)
        kept = cut_chains(paths, costs)
        assert value_of(kept, paths, costs, chain_cutting.worth_packing) == pytest.approx(best)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_no_length_for_all_is_better_whatever_nodes_cost(share):
    chance = np.random.default_rng(4)
    for _ in range(100):
        paths = chains_to_cut(chance)
        costs = TokenCosts([0.0, *chance.uniform(0.02, 0.4, len(paths) * 3).cumsum()], share)
        kept = cut_chains(paths, costs)
        for length in range(1 + max(map(len, paths))):
            level = [min(len(path), length) for path in paths]
            assert value_of(kept, paths, costs) > value_of(level, paths, costs, lambda *rows: False) - 1e-9


def test_chains_worth_less_than_any_pass_are_not_verified():
    subject = policy(node_s=0.5)
    show_chains(subject, 0.8, num_trees=4)
    subject.plan(4, 4, 100.0)
    scores = [[0.0] + [-12.0] * DEPTH for _ in range(4)]
    assert subject.cut_chains(scores, [False] * 4, [0, 1, 2, 3], 100.0) == [0] * 4


def test_dearer_levels_ask_for_more_reach():
    reach = []
    for level_s in (0.05, 0.5, 1.0):
        subject = policy(level_s=level_s)
        show_chains(subject, 0.9)
        reach.append(subject.plan(1, 1, 100.0).min_reach[1])
    assert reach == sorted(reach)
    assert 0 < reach[0] < reach[-1] < 1


def test_the_decision_and_its_reason_are_counted():
    subject = policy()
    show_chains(subject, 0.9, rounds=10)
    stats = subject.stats()
    assert stats.decisions["pays"] == 10
    assert stats.expected_speedup > 1


def test_a_plan_holds_for_batches_of_about_its_size():
    """At high load the batch changes every round, and deciding anew each time would cost more than it tells."""
    subject = policy()
    show_chains(subject, 0.9, num_trees=4)
    decided = []
    subject.rates = lambda *batch, rates=subject.rates: decided.append(batch) or rates(*batch)
    for num_reqs in (64, 62, 59, 64, 57, 60, 63, 61, 58, 59, 64, 57):
        subject.plan(num_reqs, num_reqs - 1, 100.0)
    assert len(decided) <= 4
    decided.clear()
    for num_reqs in (9, 10, 9, 10):
        subject.plan(num_reqs, num_reqs, 100.0)
    assert len(decided) == 2
    for _ in range(40):
        subject.plan(4, 4, 100.0)
    assert len(decided) >= 2 + 40 // 8 - 1


def test_contexts_are_followed_until_plain_decoding_is_clearly_faster():
    """What a drafter was not given has to be computed again: near break-even nothing changes."""
    subject = policy()

    def judged(speedup):
        subject._judge(np.array([100.0, 100.0 * speedup, 50.0]))
        return subject.follows

    assert [judged(speedup) for speedup in (1.5, 0.97, 0.9, 1.03, 1.1, 0.97)] == [True, True, False, False, True, True]


def test_knowing_prompts_counts_against_drafting():
    """A drafter that has to read long prompts for short answers may cost more than it brings."""
    subject = policy()
    show_chains(subject, 0.9)
    rates = subject.rates(1, 1, 100.0)
    subject._judge(rates)
    assert subject.follows
    subject.costs.context_s = lambda: 2.0 / float(rates[0])
    subject._judge(rates)
    assert not subject.follows


@pytest.mark.parametrize("acceptance", [0.02, 0.9])
def test_where_nobody_is_followed_it_is_still_judged(acceptance):
    subject = policy(level_s=1.0)
    show_chains(subject, acceptance)
    subject.follows = acceptance < 0.5
    for _ in range(16):
        assert not subject.plan(1, 0, 100.0).levels
    assert subject.follows == (acceptance > 0.5)


def test_one_round_is_plain_now_and_then_and_less_and_less():
    """Only where rounds tell what they take."""
    subject = policy()
    subject.stops_early = True
    show_chains(subject, 0.9, rounds=0)
    plain = [number for number in range(2000) if not subject.plan(1, 1, 100.0).levels]
    assert 4 <= len(plain) <= 12
    assert plain[0] < 30
    assert (np.diff(plain, 2) >= 0).all()
    blind = policy()
    assert all(blind.plan(1, 1, 100.0).levels for _ in range(100))


def test_a_plan_to_decode_plainly_holds_for_a_while_too():
    subject = policy(level_s=8.0)
    show_chains(subject, 0.1)
    decided = []
    subject.rates = lambda *batch, rates=subject.rates: decided.append(batch) or rates(*batch)
    subject._plain_rounds = 0
    for _ in range(32):
        subject.plan(5, 5, 100.0)
    assert 1 < len(decided) <= 5
