"""How much to speculate: each round takes the tree with the most expected tokens per second.

    tokens(levels, nodes)  = sequences + expected accepted nodes, of the best `nodes` of trees of `levels` levels
    seconds(levels, nodes) = what drafting and verifying them takes

Plain decoding is one of the choices: no levels. Decisions never change what is generated, only its speed.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from wingbeat.runtime.speculation.acceptance import FORGET_ROUNDS, DraftedTrees, prior_table
from wingbeat.runtime.speculation.curves import FADE, RoundCosts

HOLD = 8
"""Rounds that a plan holds at one load, and until the first probe."""
PROBE_ROUNDS = 3
"""Rounds in a row that try plain decoding, since the first of them shows little; one less for drafts."""
RAREST_PROBE = FORGET_ROUNDS // 4
"""Rounds at most until the next probe: several come before evidence has faded."""
PROBE_LOSS = 0.01
"""Share of the time that probes may cost."""
DOUBTS = 2.0
"""Standard errors of the gain over plain decoding by which drafts are chosen: of many guesses the best is one too high,
and a drafter slows the plain rounds that it follows. An average is known no better than by the share that fades."""


class Reason(StrEnum):
    """Why a round is drafted or not."""

    IDLE = "idle"
    """Nobody can be drafted for."""
    PLAIN = "plain"
    """Plain decoding is faster."""
    TEXT = "text"
    """Trees made of earlier text are worth more than a draft, and nobody is drafted for."""
    SPECULATE = "speculate"
    PROBE_PLAIN = "probe_plain"
    """Plain for some rounds, to see what that takes: half of every decision."""
    PROBE_DRAFT = "probe_draft"
    """Drafted for some rounds, or nothing would ever show that it pays."""
    FORCED = "forced"
    """Plain decoding would be chosen, and requests ask for drafts all the same: those are drafted for, nobody else."""


class GrowthLimits(NamedTuple):
    """Where a drafter that can look at its levels stops: grow on while sum(max(path - price, 0)) > min_reach."""

    min_reach: float
    """What one more level takes, in tokens by the parents' probability."""
    price: float
    """What verifying one more node takes, likewise."""


class DraftPlan(NamedTuple):
    """What the next draft may do."""

    levels: int
    """Most levels to grow; 0 asks for no trees."""
    reason: str
    num_nodes: int | None = None
    """Nodes of each tree to verify, its root included, where that is decided beforehand."""
    growth: GrowthLimits | None = None
    """None grows every level."""


@dataclass
class PolicyStats:
    """What was decided, and why."""

    decisions: dict[str, int] = field(default_factory=dict)
    """Rounds by reason."""
    levels: int = 0
    """Of the latest decision."""
    expected_speedup: float = 1.0
    """Predicted token rate of the latest decision over plain decoding's."""
    expected_accepted: float = 0.0
    """By the calibrated probabilities; equal to `num_accepted` where they are right."""
    num_accepted: int = 0
    break_even: float | None = None
    """Tokens per draft, the bonus token included, at which the best draft at the latest load would be as fast as plain
    decoding; None before the first decision."""
    costs_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """By phase and requests, `RoundCosts.by_batch` of whole trees."""


class TextWorth:
    """What a token is worth in rounds over trees made of earlier text alone."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._num_bare = 0
        """Rounds in a row that verified no node."""

    def token_s(self, plain_s: float) -> float | None:
        """Seconds that a token takes there, or in plain decoding where that is less; None where costs may be wrong, as
        no round has shown for long, or nothing is known.

        Args:
            plain_s: in plain decoding; 0 where that is not known.
        """
        if self._num_bare >= HOLD or not (plain_s or self._tokens):
            return None
        own_s = self._seconds / self._tokens if self._tokens else plain_s
        return min(own_s, plain_s or own_s)

    @property
    def measured_s(self) -> float:
        """Seconds that a token took in the latest rounds; 0 before there were some."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, seconds: float, num_tokens: int, num_extra: int) -> None:
        """Note a round."""
        self._num_bare = 0 if num_extra else self._num_bare + 1
        self._seconds += FADE * (seconds - self._seconds) if self._tokens else seconds
        self._tokens += FADE * (num_tokens - self._tokens) if self._tokens else num_tokens


class SpeculationPolicy:
    """Decides for one engine. Host arithmetic only; every input is a handful of small arrays.

    Args:
        costs: predicts rounds.
        max_levels: the drafter can grow.
        num_nodes: of a full tree, the root included.
        widths: nodes per tree that a round can verify where its shape is captured, the root included, ascending; None
            where any node can be left out once the trees are there, and the drafter can be told when to stop.
    """

    def __init__(
        self, costs: RoundCosts, max_levels: int, num_nodes: int, widths: tuple[int, ...] | None = None
    ) -> None:
        self.costs = costs
        self.max_levels, self.num_nodes, self.widths = max_levels, num_nodes, widths
        self._nodes = np.arange(num_nodes) if widths is None else np.array(widths) - 1
        """Drafted nodes of a tree that may be verified."""
        prior = float(prior_table()[0].mean())
        reached = np.append(0.0, prior ** np.arange(1, num_nodes)).cumsum()
        levels, nodes = np.ogrid[: max_levels + 1, :num_nodes]
        self._gain = reached[np.minimum(levels, nodes)]
        """[levels, nodes]: expected accepted nodes per drafted sequence, of the best `nodes` of its first `levels`."""
        self._grown = np.arange(max_levels + 1.0)
        """[levels]: that are grown where so many may be."""
        self._onward = prior
        """Probability mass of a level over that of the level before."""
        self._num_observed = 0
        self._until_probe = HOLD
        self._probe_every: dict[int, int] = {}
        """Rounds between probes, by power of two of the requests."""
        self._most_every = HOLD
        self._probe_left = 0
        """Rounds that the probe goes on for."""
        self._load: tuple[int, int, int] | None = None
        self._held = 0
        self._now = DraftPlan(0, Reason.IDLE)
        self._drafted = DraftPlan(max_levels, Reason.SPECULATE, widths[-1] if widths else None)
        """The best draft at the latest load."""
        self._best = max_levels, num_nodes - 1
        """Levels and drafted nodes of that."""
        self._slower: dict[tuple[int, int], float] = {}
        """By requests, and those drafted for: see `slow_down`; since the latest decision, as the next."""
        self._node_prices: dict[int, float] = {}
        self._token_s = 0.0, 0.0
        """Worth of a token: its seconds in plain decoding, and by the best draft; 0 before the first decision."""
        self._break_even: float | None = None
        self.pays = True
        """Whether drafts for all who could be drafted for are the best choice; so they may be, until one was made."""
        self._prices: dict[tuple[int, int, str], np.ndarray] = {}
        """The latest ones by load, as long as a plan holds."""
        self._text = TextWorth()
        self._decisions: dict[str, int] = {}

    def plan(
        self,
        num_reqs: int,
        num_drafting: int,
        mean_context: float,
        forced: bool = False,
        num_unfollowed: int = 0,
        num_rounds: int = 1,
    ) -> DraftPlan:
        """Decide the next draft.

        Args:
            num_reqs: sequences decoding in the next round.
            num_drafting: those among them that may be drafted for.
            mean_context: tokens of context per sequence.
            forced: some of those ask for drafts, pay they or not. What is held and probed does not change by it.
            num_unfollowed: sequences that could be drafted for if the drafter had their context. While there are such,
                drafts are probes; `pays` says whether drafts for all would be better.
            num_rounds: that have passed since the latest decision.
        """
        plan = self._now = self._plan(num_reqs, num_drafting, mean_context, num_unfollowed, num_rounds)
        if forced and not plan.levels:
            plan = DraftPlan(self.max_levels, Reason.FORCED, self.widths[-1] if self.widths else None)
        self._decisions[str(plan.reason)] = self._decisions.get(str(plan.reason), 0) + num_rounds
        return plan

    def _plan(
        self, num_reqs: int, num_drafting: int, mean_context: float, num_unfollowed: int, num_rounds: int
    ) -> DraftPlan:
        if not num_drafting:
            self._probe_left = 0
            if not num_unfollowed:
                self._load = None
                return DraftPlan(0, Reason.IDLE)
        if self._probe_left:
            self._probe_left -= 1
            return self._now
        self._until_probe -= num_rounds
        if self._until_probe <= 0 and num_drafting:  # a probe waits for somebody to draft for
            return self._probe(num_reqs.bit_length())
        self._held += num_rounds
        load = (num_reqs, num_drafting, num_unfollowed)
        if self._load == load and self._held < HOLD:
            return self._now
        self._load, self._held = load, 0
        self._until_probe = min(self._until_probe, self._probe_every.get(num_reqs.bit_length(), HOLD))
        self._decide(num_reqs, num_drafting + num_unfollowed, mean_context)
        return self._drafted if self.pays and not num_unfollowed else DraftPlan(0, Reason.PLAIN)

    def _probe(self, load: int) -> DraftPlan:
        """Begin to try what is not chosen: plain decoding, or the best draft.

        What a captured round takes is not seen, so that while drafts are chosen a whole tree is tried there.
        """
        every = self._probe_every[load] = min(2 * self._probe_every.get(load, HOLD), self._most_every)
        self._until_probe, self._load, self._probe_left = every, None, 0
        if not self._now.levels:
            self._probe_left = 0 if self.widths else PROBE_ROUNDS - 2
            return self._drafted._replace(reason=Reason.PROBE_DRAFT)
        if self.widths is not None:
            return DraftPlan(self.max_levels, Reason.PROBE_DRAFT, self.widths[-1])
        self._probe_left = PROBE_ROUNDS - 1
        return DraftPlan(0, Reason.PROBE_PLAIN)

    def _decide(self, num_reqs: int, num_drafting: int, mean_context: float) -> None:
        """The best draft for these, and whether it is better than plain decoding."""
        rates = self.rates(num_reqs, num_drafting, mean_context)
        levels, column = divmod(int(rates[1:].argmax()), rates.shape[1])
        levels += 1
        plain, drafted = float(rates[0, 0]), float(rates[levels, column])
        self.pays = drafted > plain * (1.0 + DOUBTS * max(self.costs.doubt(num_reqs), FADE))
        self._token_s = 1.0 / plain, 1.0 / drafted
        self._best = levels, int(self._nodes[column])
        self._prices.clear()
        self._slower.clear()
        self._node_prices.clear()
        # Rounds that a probe loses: its tokens, at the difference of the seconds that a token takes.
        tokens = 1.0 + num_drafting / num_reqs * float(self._gain[levels, self._nodes[column]])
        # The draft's seconds, in tokens of plain decoding, less the tokens that come without drafts.
        self._break_even = 1.0 + (plain / drafted * tokens - 1.0) * num_reqs / num_drafting
        lost = (plain / drafted - 1.0) * tokens if not self.pays else (drafted / plain - 1.0) / tokens
        self._most_every = int(min(max(PROBE_ROUNDS * lost / PROBE_LOSS, 8 * HOLD), RAREST_PROBE))
        if self.widths is not None:
            self._drafted = DraftPlan(levels, Reason.SPECULATE, self.widths[column])
        else:  # the growth rule ends drafts early, so all levels are allowed
            growth = self._growth(num_reqs, num_drafting, mean_context)
            self._drafted = DraftPlan(self.max_levels, Reason.SPECULATE, None, growth)

    def rates(self, num_reqs: int, num_drafting: int, mean_context: float) -> np.ndarray:
        """Predicted tokens per second, float64 [levels, nodes verified]: row 0 is plain decoding.

        Columns are `widths` where there are such, else 0, 1, .. drafted nodes per tree.
        """
        # Where shapes are captured every sequence takes the rows of a tree.
        verified = (num_drafting if self.widths is None else num_reqs) * self._nodes
        tokens = num_reqs + num_drafting * self._gain[:, self._nodes]
        draft_s = self.costs.draft_s(num_drafting, self._grown, mean_context)
        seconds = self.costs.verify_s(num_reqs, verified, mean_context) + draft_s[:, None]
        seconds[0] = self.costs.plain_s(num_reqs, mean_context)
        return tokens / seconds

    def _growth(self, num_reqs: int, num_drafting: int, mean_context: float) -> GrowthLimits:
        """One step ahead is enough: a level that does not pay opens the way only to deeper ones that pay less."""
        level_s = np.diff(self.costs.draft_s(num_drafting, np.array([0, 1]), mean_context))
        nodes = np.array([1, 2, max(self.num_nodes - 1, 2)])
        verify_s = self.costs.verify_s(num_reqs, nodes * num_drafting, mean_context)
        # Passes take longer by steps: a step at the first nodes says little of those behind it.
        node_s = min((verify_s[1:] - verify_s[0]) / (nodes[1:] - 1)) / num_drafting
        worth_s = self._token_s[1] * self._onward  # of a parent's probability
        return GrowthLimits(float(level_s[0]) / worth_s, max(float(node_s), 0.0) / worth_s)

    def slow_down(self, num_reqs: int, num_drafting: int, mean_context: float) -> float:
        """Time of a round behind the best draft, over that of the same round behind none."""
        key = num_reqs, num_drafting
        if key not in self._slower:
            levels, nodes = self._best
            draft_s = self.costs.draft_s(num_drafting, self._grown[levels : levels + 1], mean_context)
            verify_s = self.costs.verify_s(num_reqs, np.array([num_drafting * nodes]), mean_context)
            self._slower[key] = 1.0 + float(draft_s[0] / verify_s[0])
        return self._slower[key]

    def text_prices(self, num_reqs: int, most: int, mean_context: float) -> np.ndarray | None:
        """As `prices`, of a pass over trees made of earlier text alone; None takes all nodes, to see what it takes."""
        token_s = self._text.token_s(self._token_s[0])
        return None if token_s is None else self.costs.text_s(num_reqs, np.arange(most + 1), mean_context) / token_s

    def saw_text(self, seconds: float, num_tokens: int, num_extra: int) -> None:
        """Note a round that `text_prices` was asked of: tokens that it emitted, and drafted nodes that it verified."""
        self._text.observe(seconds, num_tokens, num_extra)

    def made_of_text(self) -> DraftPlan:
        """Note a round that nothing is drafted for, because earlier text is worth more."""
        self._until_probe -= 1
        self._decisions[str(Reason.TEXT)] = self._decisions.get(str(Reason.TEXT), 0) + 1
        return DraftPlan(0, Reason.TEXT)

    def node_price(self, num_reqs: int, mean_context: float) -> float:
        """Tokens that the time of verifying one more node is worth, where trees are full; 0 before a decision."""
        if num_reqs not in self._node_prices:
            nodes = num_reqs * (self.num_nodes - 1)
            bare_s, full_s = self.costs.verify_s(num_reqs, np.array([0, nodes]), mean_context)
            token_s = min(self._token_s)
            self._node_prices[num_reqs] = max(float(full_s - bare_s), 0.0) / nodes / token_s if token_s else 0.0
        return self._node_prices[num_reqs]

    @property
    def text_pays(self) -> bool:
        """Whether a token took less in rounds made of text than it would by the best other choice, as far as known."""
        plain_s, drafted_s = self._token_s
        return self._text.measured_s <= (min(plain_s, drafted_s) if self.pays else plain_s) or not plain_s

    @property
    def is_probing(self) -> bool:
        """Whether the next plan goes on with a probe."""
        return self._probe_left > 0

    @property
    def probe_is_due(self) -> bool:
        """Whether the next plan tries what is not chosen."""
        return self._until_probe <= 1

    def overdue(self) -> bool:
        """Whether a probe has waited too long for somebody to draft for; told so, it waits anew."""
        if self._until_probe > -4 * RAREST_PROBE:
            return False
        self._until_probe = 0
        return True

    def prices(self, num_reqs: int, most: int, mean_context: float) -> np.ndarray | None:
        """What a pass behind a draft is worth in tokens, with 0, 1, .. `most` drafted nodes: float64 [most + 1].

        None before the first decision. What the trees have cost so far is spent. Of a probe the likeliest nodes, as
        many as there are requests, are free: what is never verified is never seen to be right.
        """
        token_s, key = self._token_s[bool(self._now.levels)], (num_reqs, most, self._now.reason)
        if not token_s:
            return None
        if key not in self._prices:
            seconds = self.costs.verify_s(num_reqs, np.arange(most + 1), mean_context)
            if self._now.reason == Reason.PROBE_DRAFT:
                seconds = np.maximum(seconds, seconds[min(num_reqs, most)])
            self._prices = {key: seconds / token_s}
        return self._prices[key]

    def observe(self, path: np.ndarray, trees: DraftedTrees, levels: int) -> None:
        """Update the profile that the next decisions rest on.

        Args:
            path: path probabilities of trees that were asked for, before pruning.
            levels: of the plan they were grown by.
        """
        num_trees, width = path.shape
        deepest = int(np.where(trees.real, trees.depths, 0).max(initial=0))
        if not deepest:
            return
        self._num_observed += 1
        weight = max(FADE, 1.0 / self._num_observed)
        if deepest > 1:
            mass = np.bincount(trees.depths[trees.real], path[trees.real], deepest + 1)
            self._onward += weight * (mass[2:].sum() / mass[1:-1].sum() - self._onward)
        last = before = np.zeros(self.num_nodes)
        for limit in range(1, self.max_levels + 1):
            if limit <= deepest:
                reached = np.where(trees.real & (trees.depths <= limit), path, 0.0)
                if self.widths is None:
                    ranked = -np.sort(-reached, axis=None).reshape(width, num_trees).mean(axis=1)
                else:
                    ranked = -np.sort(-reached, axis=1).mean(axis=0)
                gain = np.append(0.0, ranked.cumsum())[np.minimum(np.arange(self.num_nodes), width)]
            elif limit <= levels:  # growth had stopped
                gain = last
            else:  # not asked for: more levels bring less and less, and no node is likelier than the best one
                gain = np.minimum(last + self._onward * (last - before), np.arange(self.num_nodes) * last[1])
            before, last = last, gain
            self._gain[limit] += weight * (gain - self._gain[limit])
            self._grown[limit] += weight * ((limit if limit > levels else min(limit, deepest)) - self._grown[limit])

    def stats(self, expected_accepted: float, num_accepted: int) -> PolicyStats:
        """Decisions so far."""
        return PolicyStats(
            decisions=dict(self._decisions),
            levels=self._now.levels,
            expected_speedup=round(self._token_s[0] / self._token_s[1], 3) if self._now.levels else 1.0,
            expected_accepted=round(expected_accepted, 1),
            num_accepted=num_accepted,
            break_even=self._break_even,
            costs_s=self.costs.by_batch(self.max_levels, self.num_nodes),
        )
