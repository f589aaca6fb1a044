"""How much to speculate: each round takes the tree with the most expected tokens per second.

    tokens(levels, nodes)  = sequences + expected accepted nodes, of the best `nodes` of trees of `levels` levels
    seconds(levels, nodes) = what drafting and verifying them takes

Plain decoding is one of the choices: no levels. Decisions never change what is generated, only its speed.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from wingbeat.runtime.speculation.acceptance import DraftedTrees
from wingbeat.runtime.speculation.costs import PLAIN_BEFORE, RoundCosts

_SMOOTHING = 0.06
"""Least weight of one round's trees in the running profile."""
_FIRST_HOLD, _HOLD = 4, 16
"""Rounds that a plan holds at one load; first that of drafts that begin, whose costs were last seen in a probe."""
_FIRST_PROBE, _LAST_PROBE, _RAREST_PROBE = 8, 48, 256
"""Rounds until a probe tries what is not chosen, and then to the next, doubled each time: tables measured in a bad
minute are set right within some dozen rounds. Probes that cost much are the rarer, as the next one says."""
_LONGEST_WAIT = 1024
"""Rounds that a probe waits for somebody to draft for, where nobody is followed."""
_PROBE_LOSS = 0.01
"""Share of the time that trying what is not chosen may cost."""
_PLAIN_PROBE, _DRAFT_PROBE = PLAIN_BEFORE + 3, 2
"""Rounds in a row that show what they take."""
_LEAST_GAIN, _LEAST_GAIN_ON_HOST = 1.04, 1.12
"""Over plain decoding, by which drafts are chosen: of many guesses the best is one too high. On a host the drafter also
takes from whoever else works on its cores, which no clock of the engine's shows, and slows the plain rounds that it
follows by up to a tenth: those that it does not follow are what drafts have to beat."""
_PRIOR_ACCEPTANCE = 0.65


class Reason(StrEnum):
    """Why a round is drafted or not."""

    IDLE = "idle"
    """Nobody can be drafted for."""
    PLAIN = "plain"
    """Plain decoding is faster."""
    SPECULATE = "speculate"
    PROBE_PLAIN = "probe_plain"
    """Plain for some rounds, to see what that takes: half of every decision."""
    PROBE_DRAFT = "probe_draft"
    """Drafted and verified whole for some rounds, or nothing would ever show that it pays."""
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
    costs_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """By phase and requests, `RoundCosts.by_batch` of whole trees."""


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
        reached = np.append(0.0, _PRIOR_ACCEPTANCE ** np.arange(1, num_nodes)).cumsum()
        levels, nodes = np.ogrid[: max_levels + 1, :num_nodes]
        self._gain = reached[np.minimum(levels, nodes)]
        """[levels, nodes]: expected accepted nodes per drafted sequence, of the best `nodes` of its first `levels`."""
        self._grown = np.arange(max_levels + 1.0)
        """[levels]: that are grown where so many may be."""
        self._onward = _PRIOR_ACCEPTANCE
        """Probability mass of a level over that of the level before."""
        self._num_observed = 0
        self._until_probe, self._probe_every, self._probed_plain = _FIRST_PROBE, _FIRST_PROBE, False
        self._probe_left = 0
        """Rounds that the probe goes on for."""
        self._load: tuple[int, int, int] | None = None
        self._held, self._hold = 0, _HOLD
        self._now = DraftPlan(0, Reason.IDLE)
        self._token_s = 0.0
        """What a token is worth: seconds of it at the best choice's rate."""
        self._speedup = 1.0
        self.pays = True
        """Whether drafts for all who could be drafted for are the best choice; so they may be, until one was made."""
        self._prices: dict[tuple[int, int], np.ndarray] = {}
        """The latest ones by load, as long as a plan holds."""
        self._probe_loss = 0.0
        """What the latest decision loses to a probe, in rounds of what it chose."""
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
            return self._probe(speculates=bool(self._now.levels))
        self._held += num_rounds
        load = (num_reqs, num_drafting, num_unfollowed)
        if self._load == load and self._held < self._hold:
            return self._now
        self._load, self._held, begins = load, 0, self._now.reason != Reason.SPECULATE
        best = self._best(num_reqs, num_drafting + num_unfollowed, mean_context)
        self.pays = bool(best.levels)
        self._hold = _FIRST_HOLD if self.pays and begins else _HOLD
        return DraftPlan(0, Reason.PLAIN) if num_unfollowed else best

    def _probe(self, speculates: bool) -> DraftPlan:
        """Begin to try what is not chosen; what a captured round takes is not seen, so that is never tried plain."""
        most = min(max(self._probe_loss / _PROBE_LOSS, _LAST_PROBE), _RAREST_PROBE)
        self._probe_every = min(2 * self._probe_every, int(most))
        self._until_probe, self._load = self._probe_every, None
        self._probed_plain = speculates and self.widths is None and not self._probed_plain
        if self._probed_plain:
            self._probe_left = _PLAIN_PROBE - 1
            return DraftPlan(0, Reason.PROBE_PLAIN)
        self._probe_left = 0 if self.widths else _DRAFT_PROBE - 1
        return DraftPlan(self.max_levels, Reason.PROBE_DRAFT, self.widths[-1] if self.widths else None)

    def _best(self, num_reqs: int, num_drafting: int, mean_context: float) -> DraftPlan:
        rates = self.rates(num_reqs, num_drafting, mean_context)
        levels, column = self._choice(rates)
        best, plain = float(rates[levels, column]), float(rates[0, 0])
        self._token_s, self._speedup = 1.0 / best, best / plain
        self._prices.clear()
        self._probe_loss = self._lost_to_a_probe(num_reqs, num_drafting, rates)
        if not levels:
            return DraftPlan(0, Reason.PLAIN)
        if self.widths is not None:
            return DraftPlan(levels, Reason.SPECULATE, self.widths[column])
        # The growth rule ends drafts early, so all levels are allowed.
        growth = self._growth(num_reqs, num_drafting, mean_context)
        return DraftPlan(self.max_levels, Reason.SPECULATE, None, growth)

    def _lost_to_a_probe(self, num_reqs: int, num_drafting: int, rates: np.ndarray) -> float:
        """What a probe loses of the best choice's gain, in rounds of that choice.

        seconds lost = tokens of the probe (1 / its rate - 1 / the best rate)
        """
        levels, column = self._choice(rates)
        best_s, plain_s, whole_s = (1.0 / float(rates[at]) for at in ((levels, column), (0, 0), (-1, -1)))
        if not levels:
            whole = num_reqs + num_drafting * float(self._gain[-1, -1])
            return _DRAFT_PROBE * whole * (whole_s - best_s) / (num_reqs * best_s)
        if self.widths is not None:
            return 0.0
        chosen = num_reqs + num_drafting * float(self._gain[levels, column])
        # A draft is tried every other time, and costs next to nothing then.
        return _PLAIN_PROBE * num_reqs * (plain_s - best_s) / (chosen * best_s) / 2

    def rates(self, num_reqs: int, num_drafting: int, mean_context: float) -> np.ndarray:
        """Predicted tokens per second, float64 [levels, nodes verified]: row 0 is plain decoding.

        Columns are `widths` where there are such, else 0, 1, .. drafted nodes per tree.
        """
        if self.widths is None:
            nodes = np.arange(self.num_nodes)
            verified = num_drafting * nodes
        else:  # every sequence takes the rows of a tree
            nodes = np.array(self.widths) - 1
            verified = num_reqs * nodes
        tokens = num_reqs + num_drafting * self._gain[:, nodes]
        draft_s = self.costs.draft_s(num_drafting, self._grown)
        seconds = self.costs.verify_s(num_reqs, verified, mean_context) + draft_s[:, None]
        seconds[0] = self.costs.plain_s(num_reqs, mean_context)
        return tokens / seconds

    def _choice(self, rates: np.ndarray) -> tuple[int, int]:
        """Levels and column of the best rate; (0, 0), plain decoding, where no other is so much higher as it must."""
        levels, column = divmod(int(rates.argmax()), rates.shape[1])
        least_gain = _LEAST_GAIN_ON_HOST if self.widths is None else _LEAST_GAIN
        return (levels, column) if rates[levels, column] > least_gain * rates[0, 0] else (0, 0)

    def _growth(self, num_reqs: int, num_drafting: int, mean_context: float) -> GrowthLimits:
        """One step ahead is enough: a level that does not pay opens the way only to deeper ones that pay less."""
        level_s = np.diff(self.costs.draft_s(num_drafting, np.array([0, 1])))
        nodes = np.array([1, 2, max(self.num_nodes - 1, 2)])
        verify_s = self.costs.verify_s(num_reqs, nodes * num_drafting, mean_context)
        # Passes take longer by steps: a step at the first nodes says little of those behind it.
        node_s = min((verify_s[1:] - verify_s[0]) / (nodes[1:] - 1)) / num_drafting
        worth_s = self._token_s * self._onward  # of a parent's probability
        return GrowthLimits(float(level_s[0]) / worth_s, max(float(node_s), 0.0) / worth_s)

    def overdue(self, patience: int) -> bool:
        """Whether a probe has waited too long for somebody to draft for; told so, it waits anew.

        Args:
            patience: times the usual wait.
        """
        if self._until_probe > -_LONGEST_WAIT * patience:
            return False
        self._until_probe = 0
        return True

    def choose_nodes(self, path: np.ndarray, real: np.ndarray, num_reqs: int, mean_context: float) -> np.ndarray:
        """Which drafted nodes are worth verifying: the best of all sequences together, as many as pay.

        Args:
            path: path probabilities [num_trees, num_nodes]; a child's is no higher than its parent's.
            real: bool [num_trees, num_nodes]: drafted nodes, roots excluded.
            num_reqs: sequences decoding, those without a tree included.

        Returns:
            bool [num_trees, num_nodes]: closed under parents, since the best are taken first.
        """
        prices = self.prices(num_reqs, real.size, mean_context)
        if prices is None:
            return real
        count = int(real.sum())
        values = np.where(real, path, -1.0).ravel()
        order = (-values).argsort(kind="stable")[:count]
        gain = np.append(0.0, values[order].cumsum())
        best = int((gain - prices[: count + 1]).argmax())
        kept = np.zeros(values.shape, dtype=bool)
        kept[order[:best]] = True
        return kept.reshape(path.shape)

    def prices(self, num_reqs: int, most: int, mean_context: float) -> np.ndarray | None:
        """What a pass behind a draft is worth in tokens, with 0, 1, .. `most` drafted nodes: float64 [most + 1].

        None where all nodes are to be verified. What the trees have cost so far is spent.
        """
        if self._now.reason == Reason.PROBE_DRAFT or not self._token_s:
            return None
        if (num_reqs, most) not in self._prices:
            seconds = self.costs.verify_s(num_reqs, np.arange(most + 1), mean_context)
            self._prices = {(num_reqs, most): seconds / self._token_s}
        return self._prices[num_reqs, most]

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
        weight = max(_SMOOTHING, 1.0 / self._num_observed)
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
            expected_speedup=round(self._speedup, 3),
            expected_accepted=round(expected_accepted, 1),
            num_accepted=num_accepted,
            costs_s=self.costs.by_batch(self.max_levels, self.num_nodes),
        )
