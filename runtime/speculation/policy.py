"""Speculate only where it pays: how deep to draft, and which nodes to verify, by marginal value.

The value of time is the token rate of the best choice. Another level is drafted only while the tokens it is expected
to bring outweigh its time at that rate, a node is verified only while its path probability outweighs its share of the
forward pass, and drafting nothing is one of the choices. Decisions never change what is generated, only its speed.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wingbeat.runtime.speculation.acceptance import AcceptanceTracker
from wingbeat.runtime.speculation.chain_cutting import TokenCosts, cut_chains
from wingbeat.runtime.speculation.costs import RoundCosts

_SMOOTHING = 0.06
"""Weight of one round in the running profile of trees."""
_FIRST_TRIAL, _LAST_TRIAL = 32, 1024
"""Plain rounds between two trials of speculation; doubled by every trial that does not pay."""
_TRIAL_ROUNDS = 8
_FIRST_EXPLORED, _FIRST_LOOK, _LAST_LOOK = 48, 24, 768
"""Rounds drafted until one is carried out to the full, levels and nodes that do not seem to pay included, or nothing
would ever show that they do; and until one is decoded plainly, since what that takes is half of every decision. Both
wait twice as long each time: at first little is known. Each load has its own count."""
_CATCH_UP = 1.05
"""Speed-up from which it pays to give a drafter the contexts that it was not given; until it is as much of a loss, it
goes on getting them."""
_PAYS, _TRIAL, _LOOK = "pays", "trial", "to see what plain decoding takes"
_PRIOR_ACCEPTANCE = 0.65
_REPLAN = 16
"""Rounds a plan holds for batches of about one size: what it rests on changes slowly."""


class DraftPlan(NamedTuple):
    """What the next draft may do."""

    levels: int
    """Most levels to grow; 0 asks for no trees."""
    reason: str
    min_reach: np.ndarray | None = None
    """float32 [max_depth + 1]: see `wingbeat.runtime.speculation.growth_rule.RuleTables`; None grows every level."""
    node_price: np.ndarray | None = None
    """float32 [max_depth + 1], likewise."""


class Round(NamedTuple):
    """One verified round, for learning. All arrays are [num_reqs, num_nodes] or [num_reqs]."""

    log_probs: np.ndarray
    depths: np.ndarray
    sampled: np.ndarray
    slots: np.ndarray
    tried: np.ndarray
    accepted: np.ndarray


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
    follows: bool = True
    """Whether drafters are given the contexts of sequences that come; see `SpeculationPolicy.follows`."""


@dataclass
class _Decision:
    """A plan, and what the rounds that follow it are judged by."""

    plan: DraftPlan
    limit: int
    """Levels of it."""
    token_s: float = 0.0
    """What a token is worth: seconds per token of the best choice; 0 before anything is known."""
    speedup: float = 1.0
    rounds_left: int = _REPLAN - 1
    """That it holds for."""
    token_costs: dict[int, TokenCosts] = field(default_factory=dict)
    """By num_reqs, worked out when first asked for."""


@dataclass
class _Drafted:
    """Rounds drafted at about one load, and how many there are to be before something else is tried."""

    num_rounds: int = 0
    explore_at: int = _FIRST_EXPLORED
    look_at: int = _FIRST_LOOK


class SpeculationPolicy:
    """Decides for one engine. Host arithmetic only; every input is a handful of small arrays.

    Args:
        costs: predicts rounds.
        tracker: predicts acceptance.
        max_depth: levels the drafter can grow.
        num_nodes: nodes of a full tree, the root included.
        stops_early: the drafter ends each draft by itself where another level does not pay (it can where looking at a
            level is no wait, so on CPUs); otherwise the depth is decided beforehand.
    """

    def __init__(
        self,
        costs: RoundCosts,
        tracker: AcceptanceTracker,
        max_depth: int,
        num_nodes: int,
        *,
        stops_early: bool = False,
    ) -> None:
        self.costs = costs
        self.tracker = tracker
        self.max_depth, self.num_nodes = max_depth, num_nodes
        self.stops_early = stops_early
        depths = np.arange(max_depth + 1)
        # By depth, per drafting sequence: expected accepted nodes, verified nodes, and how often the level was grown.
        self._mass = np.where(depths > 0, _PRIOR_ACCEPTANCE**depths, 0.0)
        self._nodes = np.where(depths > 0, (num_nodes - 1) / max_depth, 0.0)
        self._grown = np.where(depths > 0, 1.0, 0.0)
        self._next_acceptance = np.full(max_depth + 1, _PRIOR_ACCEPTANCE)
        """[d]: probability mass at depth d + 1 over that at depth d, where level d + 1 was grown."""
        expected = np.cumsum(self._nodes), np.cumsum(self._mass)
        self._gain = np.interp(np.arange(num_nodes), *expected)
        """[n]: expected accepted nodes of a drafting sequence of which the best n drafted nodes are verified."""
        self.follows = True
        """Whether drafting for everybody pays, what it takes to know their contexts included."""
        self._rounds_undrafted = 0
        self._plain_rounds = 0
        self._trial_after = _FIRST_TRIAL
        self._exploring = False
        self._drafted: dict[int, _Drafted] = {}
        """By load."""
        self._decisions: dict[str, int] = {}
        self._now = _Decision(DraftPlan(0, "no plan yet"), max_depth)
        self._standing: dict[tuple[int, int], _Decision] = {}
        """Latest decision by size of the batch, which changes whenever a sequence comes or goes."""

    def plan(self, num_reqs: int, num_drafting: int, mean_context: float) -> DraftPlan:
        """Decide the next draft.

        Args:
            num_reqs: sequences decoding in the next round.
            num_drafting: those among them that may be drafted for.
            mean_context: tokens of context per sequence.
        """
        if not num_drafting:
            self._rounds_undrafted += 1
            if self._rounds_undrafted % _REPLAN == 0:
                self._judge(self.rates(num_reqs, num_reqs, mean_context))
            self._count("nobody to draft for")
            return DraftPlan(0, "nobody to draft for")
        alike = _alike(num_reqs), _alike(num_drafting)
        standing = self._standing.get(alike)
        drafted = self._drafted_at(num_reqs)
        if self.stops_early and drafted.num_rounds >= drafted.look_at:
            drafted.look_at = _later(drafted.num_rounds)
            self._count(_LOOK)
            return DraftPlan(0, _LOOK)
        trial_due = self._plain_rounds >= self._trial_after
        if standing is not None and standing.rounds_left and not trial_due:
            self._now, self._exploring = standing, False
            standing.rounds_left -= 1
            self._plain_rounds += not standing.plan.levels
        else:
            self._now = self._decide(num_reqs, num_drafting, mean_context)
            if self._now.plan.reason != _TRIAL and not self._exploring:
                self._standing[alike] = self._now
        self._count(self._now.plan.reason)
        drafted.num_rounds += self._now.plan.levels > 0
        return self._now.plan

    def _decide(self, num_reqs: int, num_drafting: int, mean_context: float) -> "_Decision":
        rates = self.rates(num_reqs, num_drafting, mean_context)
        everybody = rates if 2 * num_drafting >= num_reqs else self.rates(num_reqs, num_reqs, mean_context)
        self._judge(everybody)
        if self.stops_early:
            best = self.max_depth if rates[-1] > rates[0] else 0
        else:
            best = int(rates.argmax())
        levels, reason = best, _PAYS if best else "plain decoding is faster"
        self._exploring = False
        if not best:
            self._plain_rounds += 1
            if self._plain_rounds > self._trial_after:
                levels, reason = self.max_depth, _TRIAL
            if self._plain_rounds >= self._trial_after + _TRIAL_ROUNDS:
                self._plain_rounds, self._trial_after = 0, min(2 * self._trial_after, _LAST_TRIAL)
        else:
            self._plain_rounds, self._trial_after = 0, _FIRST_TRIAL
            drafted = self._drafted_at(num_reqs)
            if drafted.num_rounds >= drafted.explore_at:
                levels, self._exploring = self.max_depth, True
                drafted.explore_at = _later(drafted.num_rounds)
        token_s = float(1.0 / rates[best])
        growth = () if self._exploring else self._growth(num_reqs, num_drafting, mean_context, token_s)
        plan = DraftPlan(levels, reason, *growth)
        return _Decision(plan, levels, token_s, float(rates[best] / rates[0]))

    def _judge(self, rates: np.ndarray) -> None:
        """Decide `follows`, with a margin either way: what a drafter was not given has to be computed again.

        Args:
            rates: where everybody is drafted for.
        """
        seconds = 1.0 / rates
        speedup = seconds[0] / (seconds[1:].min() + self.costs.context_s())
        self.follows = bool(speedup > (1 / _CATCH_UP if self.follows else _CATCH_UP))

    def _drafted_at(self, num_reqs: int) -> "_Drafted":
        return self._drafted.setdefault(num_reqs.bit_length(), _Drafted())

    def rates(self, num_reqs: int, num_drafting: int, mean_context: float) -> np.ndarray:
        """Predicted tokens per second by depth limit, float64 [max_depth + 1]; [0] is plain decoding."""
        tokens = num_reqs + num_drafting * np.cumsum(self._mass)
        nodes = num_drafting * np.cumsum(self._nodes)
        levels = np.cumsum(self._grown)
        seconds = self.costs.verify_s(num_reqs, nodes, mean_context)
        seconds[1:] += self.costs.draft_s(num_drafting, levels[1:]) + self.costs.host_s(True)
        seconds[0] += self.costs.host_s(False)
        return tokens / seconds

    def choose_nodes(self, path: np.ndarray, real: np.ndarray, num_reqs: int, mean_context: float) -> np.ndarray:
        """Which drafted nodes are worth verifying, over all sequences together.

        Args:
            path: path probabilities [num_trees, num_nodes]; a child's is below its parent's.
            real: bool [num_trees, num_nodes]: drafted nodes, roots excluded.
            num_reqs: sequences decoding, those without a tree included.

        Returns:
            bool [num_trees, num_nodes]: closed under parents, since the best are taken first.
        """
        count = int(real.sum())
        if self._exploring or not self._now.token_s:
            return real
        values = np.where(real, path, -1.0).ravel()
        order = (-values).argsort(kind="stable")[:count]
        gain = np.zeros(count + 1)
        values[order].cumsum(out=gain[1:])
        # What the tree has cost so far is spent: no node at all is judged by the plain pass alone.
        seconds = self.costs.verify_up_to_s(num_reqs, count, mean_context)
        if count:  # attention is paid up to the largest tree, whatever is left of the others
            seconds[1:] -= self.costs.padding_share * (seconds[1:] - seconds[-1])
        best = int((gain - seconds / self._now.token_s).argmax())
        if best == count:
            return real
        kept = np.zeros(values.shape, dtype=bool)
        kept[order[:best]] = True
        return kept.reshape(path.shape)

    def choose_width(self, num_reqs: int, num_drafting: int, mean_context: float, widths: tuple[int, ...]) -> int:
        """How many nodes of each tree to verify, where all trees of a round are as wide and padding costs its share.

        Args:
            num_reqs, num_drafting, mean_context: as for `plan`, whose latest decision counts.
            widths: to choose from, the root included; ascending.
        """
        if self._exploring:
            return widths[-1]
        extra = np.array(widths) - 1
        tokens = num_reqs + num_drafting * self._gain[extra]
        seconds = self.costs.verify_s(num_reqs, num_reqs * extra, mean_context)
        seconds += self.costs.draft_s(num_drafting, np.array(self._now.plan.levels)) + self.costs.host_s(True)
        return widths[int((tokens / seconds).argmax())]

    def observe_ranks(self, path: np.ndarray, real: np.ndarray) -> None:
        """Update the profile that `choose_width` rests on; arguments as in `choose_nodes`, rows with trees only."""
        best_first = -np.sort(-np.where(real, path, 0.0), axis=1)[:, : len(self._gain) - 1]
        now = np.concatenate([[0.0], np.cumsum(best_first.mean(axis=0))])
        self._gain += _SMOOTHING * (np.pad(now, (0, len(self._gain) - len(now)), mode="edge") - self._gain)

    def cut_chains(
        self, scores: list[list[float]], sampled: list[bool], slots: list[int], mean_context: float
    ) -> list[int]:
        """`choose_nodes` for chains, in plain numbers and with a look at padding: how many nodes of each to verify.

        Args:
            scores: by sequence, cumulative log-probabilities of its valid nodes, the root's first.
            sampled: by sequence, whether its temperature is above 0.
            slots: by sequence.
        """
        drafted = [len(chain) - 1 for chain in scores]
        if self._exploring or not self._now.token_s:
            return drafted
        paths = [self.tracker.chain_path(*chain)[1:] for chain in zip(scores, sampled, slots, strict=True)]
        return cut_chains(paths, self._token_costs(len(scores), mean_context))

    def _token_costs(self, num_reqs: int, mean_context: float) -> TokenCosts:
        known = self._now.token_costs
        if num_reqs not in known:
            seconds = self.costs.verify_up_to_s(num_reqs, num_reqs * (self.num_nodes - 1), mean_context)
            known[num_reqs] = TokenCosts((seconds / self._now.token_s).tolist(), self.costs.padding_share)
        return known[num_reqs]

    @property
    def exploring(self) -> bool:
        """Whether the latest plan is to be carried out whole, whatever seems to pay."""
        return self._exploring

    def conditional(
        self, log_probs: np.ndarray, depths: np.ndarray, sampled: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        """See `AcceptanceTracker.conditional`."""
        return self.tracker.conditional(log_probs, depths, sampled, slots)

    def observe_trees(self, path: np.ndarray, kept: np.ndarray, depths: np.ndarray, real: np.ndarray) -> None:
        """Update the profile that the next decision rests on; arguments as in `choose_nodes`, rows with trees only."""
        num_trees, width = path.shape[0], self.max_depth + 1
        if not num_trees or (self._exploring and self.stops_early):  # exploring is not what is usually done
            return
        levels = depths.ravel()
        mass = np.bincount(levels, np.where(kept, path, 0.0).ravel(), width) / num_trees
        nodes = np.bincount(levels, kept.ravel().astype(np.float64), width) / num_trees
        grown = np.bincount(levels, real.ravel().astype(np.float64), width) > 0
        reached = np.bincount(levels, np.where(real, path, 0.0).ravel(), width)
        onward = np.flatnonzero(grown[1:-1] & grown[2:]) + 1
        self._next_acceptance[onward] += _SMOOTHING * (
            reached[onward + 1] / reached[onward] - self._next_acceptance[onward]
        )
        seen = np.arange(width) <= self._now.limit
        seen[0] = False
        for profile, now in ((self._mass, mass), (self._nodes, nodes), (self._grown, grown)):
            profile[seen] += _SMOOTHING * (now[seen] - profile[seen])

    def learn(self, verified: Round) -> None:
        """Compare what was expected with what was accepted."""
        self.tracker.record(*verified)

    def stats(self) -> PolicyStats:
        """Decisions so far."""
        return PolicyStats(
            dict(self._decisions),
            self._now.limit,
            round(self._now.speedup, 3),
            round(self.tracker.expected_accepted, 1),
            self.tracker.num_accepted,
            self.follows,
        )

    def _count(self, reason: str) -> None:
        self._decisions[reason] = self._decisions.get(reason, 0) + 1

    def _growth(
        self, num_reqs: int, num_drafting: int, mean_context: float, token_s: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """From what sum of path probabilities, beyond what price of each, one more level is worth its time, by depth.

        A child is expected to be accepted as often as others at its depth: that many times its parent's probability.
        """
        verify_s = self.costs.verify_up_to_s(num_reqs, 2 * num_drafting, mean_context)
        node_s = max(float(verify_s[-1] - verify_s[num_drafting]), 0.0) / num_drafting
        # One step ahead is enough: a level that does not pay opens the way only to deeper ones that pay less.
        min_reach = self.costs.level_s(num_drafting) / token_s / self._next_acceptance
        return min_reach.astype(np.float32), (node_s / token_s / self._next_acceptance).astype(np.float32)


def _later(num_rounds: int) -> int:
    """Rounds drafted by when something is to be tried again that was tried now."""
    return num_rounds + min(num_rounds, _LAST_LOOK)


def _alike(count: int) -> int:
    """The same for batches of about the same size: exact up to 15, by eighths beyond."""
    shift = max(count.bit_length() - 4, 0)
    return count >> shift << shift
