"""Each round takes the tree with the most expected tokens per second; plain decoding is one of the choices."""

import numpy as np
import pytest

from tests.runtime.adaptive.reference_choice import chosen_nodes
from wingbeat.runtime.adaptive.acceptance import DraftedTrees
from wingbeat.runtime.adaptive.curves import DraftCurve, DraftTook, PassCurve, RoundCosts, RoundTook
from wingbeat.runtime.adaptive.policy import (
    DRAFT_PROBE,
    FORGET_ROUNDS,
    HOLD,
    PLAIN_PROBE,
    Reason,
    SpeculationPolicy,
)

pytestmark = pytest.mark.few(6)

DEPTH = 6
WIDTHS = (3, DEPTH + 1)
BATCHES = (1, 8, 64)


class Linear(PassCurve):
    """A plain pass of B sequences takes 4 + 0.1 B, each node `node_s` more."""

    node_s = 0.0

    def seconds(self, num_reqs, num_extra, context):
        return 4 + 0.1 * num_reqs + self.node_s * np.asarray(num_extra, dtype=float)


def policy(level_s=0.3, node_s=0.05, widths=None):
    """Costs linear in everything."""
    passes = type("Passes", (Linear,), {"node_s": node_s})((1,), (1.0,))
    drafts = DraftCurve((1, 64), (0.2, 0.2), (level_s, level_s))
    return SpeculationPolicy(RoundCosts(passes, drafts), DEPTH, DEPTH + 1, widths)


def chains(acceptance, num_trees=1, levels=DEPTH):
    """Path probabilities of chains whose every node is accepted with this probability, and the chains."""
    depths = np.tile(np.arange(levels + 1), (num_trees, 1))
    trees = DraftedTrees(np.maximum(depths - 1, 0), depths, np.zeros(depths.shape), depths > 0)
    return acceptance**depths, trees


def shown(subject, acceptance, rounds=200):
    for _ in range(rounds):
        subject.observe(*chains(acceptance), DEPTH, 1)
    return subject


def by_hand(acceptance, level_s, node_s, batch):
    """Tokens per second of chains, [levels, nodes verified]."""
    levels, nodes = np.ogrid[: DEPTH + 1, : DEPTH + 1]
    reached = np.append(0.0, acceptance ** np.arange(1.0, DEPTH + 1)).cumsum()
    seconds = 4 + 0.1 * batch + node_s * batch * nodes + np.where(levels > 0, 0.2 + level_s * levels, 0.0)
    rates = batch * (1 + reached[np.minimum(levels, nodes)]) / seconds
    rates[0] = batch / (4 + 0.1 * batch)
    return rates


CASES = [(0.05, 4.0, 1.0, 64), (0.3, 0.3, 0.05, 1), (0.6, 0.05, 1.0, 8), (0.8, 1.0, 0.0, 64), (0.95, 0.3, 0.05, 8)]


@pytest.mark.parametrize(("acceptance", "level_s", "node_s", "batch"), CASES)
def test_the_plan_is_the_best_tree_of_all(acceptance, level_s, node_s, batch):
    subject = shown(policy(level_s, node_s), acceptance)
    expected = by_hand(acceptance, level_s, node_s, batch)
    assert subject.rates(batch, batch, 100.0) == pytest.approx(expected, rel=0.01)
    plan = subject.plan(batch, batch, 100.0)
    # A drafter on the host stops by itself.
    best = DEPTH if expected.argmax() >= DEPTH + 1 else 0
    assert (plan.levels, plan.reason) == (best, Reason.SPECULATE if best else Reason.PLAIN)
    assert subject.stats(0.0, 0).expected_speedup == pytest.approx(expected.max() / expected[0, 0], rel=0.01)


@pytest.mark.parametrize("widths", [None, WIDTHS], ids=["host", "captured"])
def test_a_draft_in_one_pass_is_never_asked_for_in_part_to_save_time(widths):
    """Levels that cost nothing: load makes fewer nodes verified, and no level less would be quicker."""
    subject = shown(policy(0.0, 0.3, widths), 0.8)
    nodes = []
    for batch in BATCHES:
        rates = subject.rates(batch, batch, 100.0)
        assert np.all(np.diff(rates[1:], axis=0) >= -1e-9)
        nodes.append(rates.max(axis=0).argmax())
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[-1]


@pytest.mark.parametrize(("acceptance", "level_s", "node_s", "batch"), CASES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_with_as_many_tokens_per_draft_as_break_even_says_the_best_draft_is_as_fast_as_plain_decoding(
    acceptance, level_s, node_s, batch, share
):
    drafting = max(int(share * batch), 1)
    subject = shown(policy(level_s, node_s), acceptance)
    assert subject.stats(0.0, 0).break_even is None
    subject.plan(batch, drafting, 100.0)
    rates = subject.rates(batch, drafting, 100.0)
    levels, nodes = divmod(int(rates[1:].argmax()), rates.shape[1])
    reached = np.append(0.0, acceptance ** np.arange(1.0, DEPTH + 1)).cumsum()
    seconds = (batch + drafting * reached[min(levels + 1, nodes)]) / rates[levels + 1, nodes]
    with_break_even = batch + drafting * (subject.stats(0.0, 0).break_even - 1.0)
    assert with_break_even / seconds == pytest.approx(rates[0, 0], rel=0.01)


def test_a_captured_shape_costs_its_rows_for_every_sequence():
    subject = shown(policy(0.3, 0.05, WIDTHS), 0.8)
    nodes = np.array(WIDTHS) - 1
    reached = np.append(0.0, 0.8 ** np.arange(1.0, DEPTH + 1)).cumsum()[nodes]
    rates = subject.rates(8, 4, 100.0)
    assert rates[DEPTH] == pytest.approx((8 + 4 * reached) / (4.8 + 0.05 * 8 * nodes + 0.2 + 0.3 * DEPTH), rel=0.01)
    assert rates[0] == pytest.approx(8 / 4.8)
    assert subject.plan(8, 8, 100.0).num_nodes == WIDTHS[-1]
    dear = shown(policy(0.05, 0.2, WIDTHS), 0.8)
    plan = dear.plan(8, 8, 100.0)
    assert (plan.levels, plan.num_nodes, plan.growth) == (2, WIDTHS[0], None)


def test_of_several_trees_the_likeliest_nodes_count_together_unless_each_has_its_rows():
    depths = np.tile(np.arange(3), (2, 1))
    trees = DraftedTrees(np.maximum(depths - 1, 0), depths, np.zeros(depths.shape), depths > 0)
    path = np.array([[1.0, 0.9, 0.8], [1.0, 0.2, 0.1]])
    together, apart = policy(), policy(widths=WIDTHS)
    for subject in (together, apart):
        subject.observe(path, trees, DEPTH, 2)
    assert together._gain[2, :3] == pytest.approx([0.0, 0.85, 1.0])
    assert apart._gain[2, :3] == pytest.approx([0.0, 0.55, 1.0])


def test_requested_trees_without_a_node_bring_and_cost_nothing():
    """A drafter that continues earlier text answers a quarter of the requests: a quarter of gain and rows."""
    subject = policy(level_s=0.3, node_s=0.5)
    for _ in range(400):
        subject.observe(*chains(0.8, 2), DEPTH, 8)
    levels, nodes = np.ogrid[: DEPTH + 1, : DEPTH + 1]
    reached = np.append(0.0, 0.8 ** np.arange(1.0, DEPTH + 1)).cumsum()
    seconds = 4.8 + 0.5 * 8 / 4 * nodes + np.where(levels > 0, 0.2 + 0.3 * levels, 0.0)
    expected = 8 * (1 + reached[np.minimum(levels, nodes)] / 4) / seconds
    expected[0] = 8 / 4.8
    assert subject.rates(8, 8, 100.0) == pytest.approx(expected, rel=0.01)
    none = np.ones((0, DEPTH + 1))
    for _ in range(400):
        subject.observe(none, DraftedTrees(none, none, none, none > 1), DEPTH, 8)
    assert subject.plan(8, 8, 100.0).reason == Reason.PLAIN


def test_a_context_is_replayed_only_if_drafts_save_more_than_that_takes():
    subject = shown(policy(), 0.8)
    assert not subject.replay_pays(1, 1000), "nothing was decided yet"
    subject.plan(1, 1, 100.0)
    saved_s = 1000 * (4.1 - 1 / by_hand(0.8, 0.3, 0.05, 1).max())
    rows = round(saved_s / 0.05)  # a row takes 0.05 s
    assert subject.replay_pays(rows - 10, 1000)
    assert not subject.replay_pays(rows + 10, 1000)


def test_levels_that_were_not_asked_for_are_expected_to_bring_less_and_less():
    subject = policy(widths=WIDTHS)
    subject.observe(*chains(0.9, levels=2), 2, 1)
    assert subject._gain[:, DEPTH] == pytest.approx(np.append(0.0, 0.9 ** np.arange(1, DEPTH + 1)).cumsum())


def test_a_plan_holds_for_some_rounds_of_one_load(monkeypatch):
    subject, asked = shown(policy(), 0.8), []
    decide = subject._decide
    monkeypatch.setattr(subject, "_decide", lambda *load: (asked.append(len(plans)), decide(*load)))
    monkeypatch.setattr(subject, "_probe_every", {1: 1000, 2: 1000})
    monkeypatch.setattr(subject, "_until_probe", 1000)
    plans = []
    while len(plans) < 3 * HOLD:
        plans.append(subject.plan(1, 1, 100.0))
    plans.append(subject.plan(2, 2, 100.0))
    assert asked == [0, HOLD, 2 * HOLD, 3 * HOLD]


def test_drafts_have_to_be_better_by_more_than_the_doubt_about_it(monkeypatch):
    subject = shown(policy(), 0.5)
    gain = subject.rates(8, 8, 100.0).max() / subject.rates(8, 8, 100.0)[0, 0]
    for doubt, reason in ((0.8 * (gain - 1), Reason.SPECULATE), (1.2 * (gain - 1), Reason.PLAIN)):
        monkeypatch.setattr(subject.costs, "doubt", lambda num_reqs, plain_s, drafted_s, doubt=doubt: doubt)
        monkeypatch.setattr(subject, "_load", None)
        assert subject.plan(8, 8, 100.0).reason == reason


def test_nobody_to_draft_for_is_no_draft():
    plan = policy().plan(4, 0, 100.0)
    assert (plan.levels, plan.reason) == (0, Reason.IDLE)


@pytest.mark.parametrize("node_s", [0.0, 0.02, 0.2, 3.0])
def test_nodes_are_shared_out_by_joint_probability(node_s):
    subject = shown(policy(node_s=node_s), 0.8)
    subject.plan(8, 8, 100.0)
    chance = np.random.default_rng(0)
    path = np.cumprod(chance.uniform(0.2, 0.95, (8, DEPTH + 1)), axis=1)
    real = np.tile(np.arange(DEPTH + 1) > 0, (8, 1))
    real[3, 4:] = False
    kept = chosen_nodes(subject, path, real, 8)
    assert not (kept & ~real).any()
    if kept.any() and (real & ~kept).any():
        assert path[kept].min() >= path[real & ~kept].max()
    assert (kept[:, 2:] <= kept[:, 1:-1]).all()
    order = np.sort(path[real])[::-1]
    value = [order[:n].sum() - (4.8 + node_s * n) * subject.rates(8, 8, 100.0).max() for n in range(len(order) + 1)]
    assert value[int(kept.sum())] == pytest.approx(max(value))


def test_growth_pays_where_a_level_brings_more_than_it_takes():
    """A level takes l, a node n seconds, at r tokens per second; a is the next acceptance: sum(a p - n r) > l r."""
    subject = shown(policy(level_s=0.5, node_s=0.2), 0.7)
    plan, rate = subject.plan(1, 1, 100.0), by_hand(0.7, 0.5, 0.2, 1).max()
    assert plan.growth == pytest.approx((0.5 * rate / 0.7, 0.2 * rate / 0.7), rel=0.01)


def life(subject, rounds, acceptance, batch=1):
    """Plans of so many rounds; trees are seen whenever there are some."""
    plans = []
    for _ in range(rounds):
        plans.append(subject.plan(batch, batch, 100.0))
        if plans[-1].levels:
            subject.observe(*chains(acceptance, batch, plans[-1].levels), plans[-1].levels, batch)
    return plans


@pytest.mark.slow
def test_drafts_that_pay_again_are_found_out():
    subject = shown(policy(), 0.02)
    assert {plan.reason for plan in life(subject, 200, 0.02)} == {Reason.PLAIN, Reason.PROBE_DRAFT}
    assert sum(bool(plan.levels) for plan in life(subject, 640, 0.02)) <= 40
    assert Reason.SPECULATE in {plan.reason for plan in life(subject, 4000, 0.95)[-2:]}


@pytest.mark.slow
@pytest.mark.parametrize("widths", [None, WIDTHS])
def test_what_is_not_chosen_is_tried_now_and_then(widths):
    """Plain rounds only where their time is seen; what a captured shape takes is not."""
    reasons = [plan.reason for plan in life(shown(policy(widths=widths), 0.8), 1280, 0.8)]
    assert reasons.count(Reason.SPECULATE) >= 1210
    assert (reasons.count(Reason.PROBE_DRAFT) >= 4) == (widths is not None)
    assert (reasons.count(Reason.PROBE_PLAIN) >= 10) == (widths is None)


@pytest.mark.few(2)
@pytest.mark.parametrize(("acceptance", "way_s"), [(0.6, 1.0), (0.6, 20.0), (0.95, 5.0), (0.95, 20.0), (0.95, 80.0)])
def test_a_way_to_the_drafter_that_gets_longer_than_drafts_are_worth_ends_them_until_it_is_short(acceptance, way_s):
    """The tables know of no way; a chain of 6 levels takes 2 s, a plain round 4.1 s."""
    subject = shown(policy(), acceptance)

    def run(way_s, rounds):
        for _ in range(rounds):
            levels = subject.plan(1, 1, 100.0).levels
            draft = DraftTook(way_s + 0.2 + 0.3 * levels, 1, levels) if levels else None
            subject.costs.observe(RoundTook(4.1 + 0.05 * levels, 1, levels, 100.0, draft=draft))
        return subject.stats(0.0, 0).expected_speedup > 1

    assert run(0.0, 100)
    reached = (acceptance ** np.arange(1.0, DEPTH + 1)).sum()
    pays = 4.1 * (1 + reached) > 4.1 + 0.05 * DEPTH + way_s + 0.2 + 0.3 * DEPTH
    assert run(way_s, 800) == pays
    assert run(0.0, 8000)


def test_a_probe_verifies_the_likeliest_node_of_each_request_whatever_it_is_thought_to_be_worth():
    subject = shown(policy(node_s=3.0), 0.02)
    path, trees = chains(0.1, 4)
    while subject.plan(4, 4, 100.0).reason != Reason.PROBE_DRAFT:
        assert not chosen_nodes(subject, path, trees.real, 4).any()
    assert chosen_nodes(subject, path, trees.real, 4).sum(axis=1).tolist() == [1] * 4


class Clock:
    """Rounds of a machine on a made-up clock, whose tables are off.

    Whatever is drafted takes `slower` times what the tables say; a round behind a draft `behind_s` more than its pass.
    """

    def __init__(self, subject, acceptance, slower, behind_s=0.0):
        self.subject, self.acceptance, self.slower, self.behind_s = subject, acceptance, slower, behind_s
        self.now, self.reasons = 0.0, []

    def run(self, rounds, batch=8):
        tokens, started, levels = 0.0, self.now, 0
        for _ in range(rounds):
            plan = self.subject.plan(batch, batch, 100.0)
            self.reasons.append(plan.reason)
            tokens += self._round(levels, bool(plan.levels), batch)
            levels = plan.levels
        return tokens / (self.now - started)

    def _round(self, levels, asks, batch):
        """Run a round after a draft of so many levels; returns its tokens."""
        tokens, kept, draft = float(batch), 0, None
        if levels:
            path, trees = chains(self.acceptance, batch, levels)
            chosen = chosen_nodes(self.subject, path, trees.real, batch)
            kept = int(chosen.sum())
            tokens += path[chosen].sum()
            self.subject.observe(path, trees, levels, batch)
            draft = DraftTook(self.slower * (0.2 + 0.3 * levels), batch, levels)
        seconds = (4.8 + 0.05 * kept) * (self.slower if kept else 1.0) + (self.behind_s if levels else 0.0)
        self.subject.costs.observe(RoundTook(seconds, batch, kept, 100.0, draft=draft, asks=asks))
        self.now += seconds + (draft.seconds if draft else 0.0)
        return tokens


@pytest.mark.few(2)
@pytest.mark.parametrize("behind_s", [0.0, 4.0])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_no_clock_shows_less_than_the_better_of_plain_and_a_fixed_chain(acceptance, slower, behind_s):
    clock = Clock(policy(), acceptance, slower, behind_s)
    clock.run(200)
    reached = (acceptance ** np.arange(1, 6)).sum()
    chain = 8 * (1 + reached) / (slower * (4.8 + 0.05 * 8 * 5 + 0.2 + 0.3 * 5) + behind_s)
    assert clock.run(1000) > 0.97 * max(8 / 4.8, chain)


def test_a_weak_head_is_given_up_and_its_probes_take_a_hundredth_of_the_time():
    """Half of the tokens accepted at each level, and rounds behind a draft 3 s longer: plain decoding wins by 1.3.

    In 2000 rounds, two in every few hundred are drafted, and the policy does not return to drafting between them.
    """
    clock = Clock(policy(), 0.5, 1.0, behind_s=3.0)
    clock.run(200)
    clock.reasons.clear()
    rate = clock.run(2000)
    drafted = clock.reasons.count(Reason.PROBE_DRAFT)
    assert set(clock.reasons) == {Reason.PLAIN, Reason.PROBE_DRAFT}
    assert 10 <= drafted <= 80
    assert rate > 0.985 * 8 / 4.8


@pytest.mark.slow
def test_a_head_that_pays_is_drafted_for_and_plain_rounds_are_tried_some_in_a_row():
    clock = Clock(policy(), 0.8, 1.0, behind_s=1.0)
    clock.run(200)
    clock.reasons.clear()
    clock.run(2000)
    assert clock.reasons.count(Reason.SPECULATE) > 1800
    runs = "".join("p" if reason is Reason.PROBE_PLAIN else "." for reason in clock.reasons).split(".")
    assert {len(run) for run in runs[1:-1]} == {0, PLAIN_PROBE}


def test_who_is_not_followed_counts_for_what_would_pay_and_drafts_are_probes_meanwhile():
    subject = shown(policy(), 0.8)
    plans = [subject.plan(8, 1, 100.0, False, 7) for _ in range(400)]
    assert {plan.reason for plan in plans} == {Reason.PLAIN, Reason.PROBE_DRAFT}
    assert subject.pays
    assert subject.plan(8, 8, 100.0).reason == Reason.SPECULATE
    weak = shown(policy(), 0.05)
    assert {weak.plan(8, 1, 100.0, False, 7).reason for _ in range(400)} == {Reason.PLAIN, Reason.PROBE_DRAFT}
    assert not weak.pays


def test_a_probe_waits_for_somebody_to_draft_for_and_says_once_that_it_waits_for_long():
    subject = shown(policy(), 0.05)
    assert {subject.plan(2, 0, 100.0, False, 2).reason for _ in range(FORGET_ROUNDS)} == {Reason.PLAIN}
    assert not subject.overdue()
    for _ in range(HOLD):
        subject.plan(2, 0, 100.0, False, 2)
    assert subject.overdue()
    assert not subject.overdue()
    reasons = [subject.plan(2, 1, 100.0, False, 1).reason for _ in range(DRAFT_PROBE + 1)]
    assert reasons == [Reason.PROBE_DRAFT] * DRAFT_PROBE + [Reason.PLAIN]


def test_statistics_say_what_was_decided_and_why():
    subject = policy()
    for num_drafting in (1, 0, 1):
        subject.plan(1, num_drafting, 100.0)
    stats = subject.stats(1.23, 4)
    assert stats.decisions == {"speculate": 2, "idle": 1}
    assert (stats.expected_accepted, stats.num_accepted) == (1.2, 4)
