"""Speculation policy: each round takes the tree shape with the most expected tokens per second.

    tokens(levels, nodes)  = sequences + expected accepted nodes, for the best `nodes` nodes of trees of `levels` levels
    seconds(levels, nodes) = predicted time to draft and verify these trees

Plain decoding is the choice with 0 levels. Decisions change the speed of generation, never the generated tokens.
"""

from typing import NamedTuple

import numpy as np

from wingbeat.runtime.adaptive.acceptance import FORGET_ROUNDS, DraftedTrees, prior_table
from wingbeat.runtime.adaptive.curves import FADE, RoundCosts
from wingbeat.runtime.engine.speculation import DraftPlan, PolicyStats, Reason

HOLD = 8
"""Number of rounds for which a decision holds at unchanged load, and number of rounds until the first probe."""
PLAIN_PROBE, DRAFT_PROBE = 4, 2
"""Numbers of consecutive rounds in a probe of plain decoding, and in a probe of drafts. The first round of a probe is
not measured, because the drafter still slows it or must first process context; nor is the last plain round, which
requests a draft.
"""
PROBE_LOSS = 0.01
"""Maximum fraction of time that probes may cost."""


class GrowthLimits(NamedTuple):
    """Limits for a drafter that can stop after any level.

    The drafter continues while sum(max(path - price, 0)) > min_reach, where `path` is a node's path probability.
    """

    min_reach: float
    """Cost of growing one more level, expressed as probability mass of the level's parents."""
    price: float
    """Cost of verifying one more node, also expressed as probability mass."""


class TextWorth:
    """Measured seconds per token in rounds whose trees are all built from earlier text."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._num_bare = 0
        """Number of latest consecutive rounds that verified no drafted node."""

    def token_s(self, plain_s: float) -> float | None:
        """Returns seconds per token in rounds with draft trees built from earlier text, or in plain decoding if less.

        Returns None to request a trial, if nothing was measured yet, or if the last `HOLD` rounds verified no node so
        that the measured cost may be outdated.

        Args:
            plain_s: seconds per token in plain decoding; 0 if unknown.
        """
        if self._num_bare >= HOLD or not (plain_s or self._tokens):
            return None
        own_s = self._seconds / self._tokens if self._tokens else plain_s
        return min(own_s, plain_s or own_s)

    @property
    def measured_s(self) -> float:
        """Average seconds per token of the latest rounds; 0 before the first round."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, seconds: float, num_tokens: int, num_extra: int) -> None:
        """Adds the measurement of a round."""
        self._num_bare = 0 if num_extra else self._num_bare + 1
        self._seconds += FADE * (seconds - self._seconds) if self._tokens else seconds
        self._tokens += FADE * (num_tokens - self._tokens) if self._tokens else num_tokens


class SpeculationPolicy:
    """Decides how one engine drafts; a decision takes only computations on a few small arrays on the host.

    Args:
        costs: predictions of the duration of rounds.
        max_levels: maximum number of levels that the drafter can grow.
        num_nodes: number of nodes of a full tree, including the root.
        widths: numbers of nodes per tree, including the root, that captured rounds can verify, ascending. None if
            rounds can verify any number of nodes and the drafter accepts growth limits.
    """

    def __init__(
        self, costs: RoundCosts, max_levels: int, num_nodes: int, widths: tuple[int, ...] | None = None
    ) -> None:
        self.costs = costs
        self.max_levels, self.num_nodes, self.widths = max_levels, num_nodes, widths
        self._nodes = np.arange(num_nodes) if widths is None else np.array(widths) - 1
        """Possible numbers of drafted nodes that a round verifies per tree."""
        prior = float(prior_table()[0].mean())
        reached = np.append(0.0, prior ** np.arange(1, num_nodes)).cumsum()
        levels, nodes = np.ogrid[: max_levels + 1, :num_nodes]
        self._gain = reached[np.minimum(levels, nodes)]
        """Expected number of accepted nodes per drafted sequence, indexed by [levels, nodes], if the tree has `levels`
        levels and its best `nodes` drafted nodes are verified.
        """
        self._answered, self._num_asked = 1.0, HOLD
        """Average share of requested trees that have a drafted node, and number of observations in it; the initial
        value counts as `HOLD` of them. Many trees of drafters that continue earlier text have none.
        """
        self._grown = np.arange(max_levels + 1.0)
        """Average number of levels that are grown, by the number of levels allowed."""
        self._onward = prior
        """Average ratio of a level's probability mass to the previous level's probability mass."""
        self._num_observed = 0
        self._until_probe = HOLD
        self._probe_every: dict[int, int] = {}
        """Number of rounds between probes, by bit length of the number of requests."""
        self._most_every = HOLD
        self._probe_left = 0
        """Number of rounds for which the current probe continues."""
        self._load: tuple[int, int, int] | None = None
        self._held = 0
        self._now = DraftPlan(0, Reason.IDLE)
        self._drafted = DraftPlan(max_levels, Reason.SPECULATE, widths[-1] if widths else None)
        """Best draft at the latest load."""
        self._best = max_levels, num_nodes - 1
        """Numbers of levels and drafted nodes of the best draft."""
        self._slower: dict[tuple[int, int], float] = {}
        """Results of `slow_down` since the latest decision, by numbers of requests and of drafting requests."""
        self._token_s = 0.0, 0.0
        """Seconds per token in plain decoding, and with the best draft; 0 before the first decision."""
        self._break_even: float | None = None
        self.pays = True
        """Whether drafting for all eligible requests is the best choice; True before the first decision."""
        self._prices: dict[tuple[int, int, str], np.ndarray] = {}
        """Latest result of `prices`, by load; cleared by the next decision."""
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
        """Decides the next draft.

        Args:
            num_reqs: number of sequences that decode in the next round.
            num_drafting: number of these sequences for which trees may be requested.
            mean_context: mean number of context tokens per sequence.
            forced: whether some sequences demand drafts even at a loss. Held decisions and probes are not affected.
            num_unfollowed: number of sequences that could get trees if the drafter had the sequences' context. While
                there are such sequences, only probes are drafted; `pays` then states whether drafting for all sequences
                would be better.
            num_rounds: number of rounds since the latest call.
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
        if self._until_probe <= 0 and num_drafting:  # a probe needs a sequence for which to draft
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
        """Begins a probe of the alternative that is not chosen: plain decoding, or the best draft.

        In engines with captured rounds the duration of passes is not measured, so a probe of plain decoding would show
        nothing. Instead, while drafts are chosen, the probe is a draft of a whole tree.
        """
        every = self._probe_every[load] = min(2 * self._probe_every.get(load, HOLD), self._most_every)
        self._until_probe, self._load, self._probe_left = every, None, 0
        if not self._now.levels:
            self._probe_left = 0 if self.widths else DRAFT_PROBE - 1
            return self._drafted._replace(reason=Reason.PROBE_DRAFT)
        if self.widths is not None:
            return DraftPlan(self.max_levels, Reason.PROBE_DRAFT, self.widths[-1])
        self._probe_left = PLAIN_PROBE - 1
        return DraftPlan(0, Reason.PROBE_PLAIN)

    def _decide(self, num_reqs: int, num_drafting: int, mean_context: float) -> None:
        """Finds the best draft at this load, and decides whether it is better than plain decoding."""
        rates = self.rates(num_reqs, num_drafting, mean_context)
        levels, column = divmod(int(rates[1:].argmax()), rates.shape[1])
        levels += 1
        plain, drafted = float(rates[0, 0]), float(rates[levels, column])
        tokens = 1.0 + num_drafting * self._answered / num_reqs * float(self._gain[levels, self._nodes[column]])
        doubt = self.costs.doubt(num_reqs, num_reqs / plain, num_reqs * tokens / drafted)
        # Drafts are chosen if they are better by a standard error of the prediction, because the best of many noisy
        # estimates is biased upwards, and because a drafter slows the plain rounds that follow its drafts.
        self.pays = drafted > plain * (1.0 + max(doubt, FADE))
        self._token_s = 1.0 / plain, 1.0 / drafted
        self._best = levels, int(self._nodes[column])
        self._prices.clear()
        self._slower.clear()
        # `lost` is the time that a probe round wastes, as a fraction of a round's time. `lost` follows from the tokens
        # of a round and the difference in seconds per token.
        # The drafted round's seconds, converted to tokens of plain decoding, less the tokens that are generated without
        # drafts.
        self._break_even = 1.0 + (plain / drafted * tokens - 1.0) * num_reqs / num_drafting
        lost = (plain / drafted - 1.0) * tokens if not self.pays else (drafted / plain - 1.0) / tokens
        # At most `FORGET_ROUNDS` // 4 rounds pass between probes, so that several probes happen before their evidence
        # has decayed.
        self._most_every = int(min(max(PLAIN_PROBE * lost / PROBE_LOSS, 8 * HOLD), FORGET_ROUNDS // 4))
        if self.widths is not None:
            self._drafted = DraftPlan(levels, Reason.SPECULATE, self.widths[column])
        else:  # all levels are allowed, because the growth rule stops drafts early
            growth = self._growth(num_reqs, num_drafting, mean_context)
            self._drafted = DraftPlan(self.max_levels, Reason.SPECULATE, None, growth)

    def rates(self, num_reqs: int, num_drafting: int, mean_context: float) -> np.ndarray:
        """Returns predicted tokens per second, float64 [levels, verified nodes]; row 0 is plain decoding.

        The columns are `widths`, if set; else 0, 1, .. drafted nodes per tree.
        """
        # In captured rounds each sequence has as many rows as a tree may have nodes, even if the sequence has no
        # tree.
        num_trees = num_drafting * self._answered
        verified = (num_trees if self.widths is None else num_reqs) * self._nodes
        tokens = num_reqs + num_trees * self._gain[:, self._nodes]
        draft_s = self.costs.draft_s(num_drafting, self._grown, mean_context)
        seconds = self.costs.verify_s(num_reqs, verified, mean_context) + draft_s[:, None]
        seconds[0] = self.costs.plain_s(num_reqs, mean_context)
        return tokens / seconds

    def _growth(self, num_reqs: int, num_drafting: int, mean_context: float) -> GrowthLimits:
        """Returns growth limits that follow from the cost of one more level.

        Considering only the next level suffices, because the levels after a level that does not pay would pay even
        less.
        """
        level_s = np.diff(self.costs.draft_s(num_drafting, np.array([0, 1]), mean_context))
        nodes = np.array([1, 2, max(self.num_nodes - 1, 2)])
        verify_s = self.costs.verify_s(num_reqs, nodes * num_drafting, mean_context)
        # The duration of passes grows in steps, so a step at the first nodes does not predict the cost of later nodes.
        node_s = min((verify_s[1:] - verify_s[0]) / (nodes[1:] - 1)) / num_drafting
        worth_s = self._token_s[1] * self._onward  # seconds that one unit of a parent's probability is worth
        return GrowthLimits(float(level_s[0]) / worth_s, max(float(node_s), 0.0) / worth_s)

    def slow_down(self, num_reqs: int, num_drafting: int, mean_context: float) -> float:
        """Returns the duration of a round with the best draft, divided by the round's duration without the drafting."""
        key = num_reqs, num_drafting
        if key not in self._slower:
            levels, nodes = self._best
            draft_s = self.costs.draft_s(num_drafting, self._grown[levels : levels + 1], mean_context)
            verify_s = self.costs.verify_s(num_reqs, np.array([num_drafting * nodes]), mean_context)
            self._slower[key] = 1.0 + float(draft_s[0] / verify_s[0])
        return self._slower[key]

    def text_prices(self, num_reqs: int, most: int, mean_context: float) -> np.ndarray | None:
        """Returns prices as `prices` does, for a pass whose trees are all built from earlier text.

        The first price is that of a plain round. Returns None if all nodes are to be verified, so that the cost of
        nodes is measured.
        """
        token_s = self._text.token_s(self._token_s[0])
        if token_s is None:
            return None
        seconds = self.costs.text_s(num_reqs, np.arange(most + 1), mean_context)
        seconds[0] = min(self.costs.plain_s(num_reqs, mean_context), seconds[0])
        return seconds / token_s

    def saw_text(self, seconds: float, num_tokens: int, num_extra: int) -> None:
        """Records a round for which `text_prices` was called: seconds, emitted tokens, and verified drafted nodes."""
        self._text.observe(seconds, num_tokens, num_extra)

    def made_of_text(self) -> DraftPlan:
        """Returns the plan of a round whose trees are all built from earlier text, and counts this decision."""
        self._until_probe -= 1
        self._decisions[str(Reason.TEXT)] = self._decisions.get(str(Reason.TEXT), 0) + 1
        return DraftPlan(0, Reason.TEXT)

    @property
    def text_pays(self) -> bool:
        """Whether rounds with draft trees built from earlier text took less time per token than is predicted for a
        drafter's trees and for plain decoding.
        """
        plain_s, drafted_s = self._token_s
        return self._text.measured_s <= (min(plain_s, drafted_s) if self.pays else plain_s) or not plain_s

    @property
    def is_probing(self) -> bool:
        """Whether the next plan continues a probe."""
        return self._probe_left > 0

    @property
    def probe_is_due(self) -> bool:
        """Whether the next plan begins a probe."""
        return self._until_probe <= 1

    def replay_pays(self, num_tokens: int, num_left: int) -> bool:
        """Whether drafts for one sequence save more time than the replay of its context for the drafter takes.

        Args:
            num_tokens: number of tokens of the context.
            num_left: number of tokens that the sequence is expected to emit.
        """
        plain_s, drafted_s = self._token_s
        return self.costs.replay_s(num_tokens) < num_left * (plain_s - drafted_s)

    def overdue(self) -> bool:
        """Whether a probe has waited too long for a sequence that can get drafts; if so, the wait starts again."""
        if self._until_probe > -FORGET_ROUNDS:
            return False
        self._until_probe = 0
        return True

    def prices(self, num_reqs: int, most: int, mean_context: float) -> np.ndarray | None:
        """Returns the cost in tokens of passes with 0, 1, .. `most` drafted nodes after a draft: float64 [most + 1].

        Returns None before the first decision. The cost of drafting the trees is not included, because that time is
        already spent. In a probe of drafts, the first `num_reqs` nodes count as free, because otherwise these nodes
        might never be verified, and their acceptance could never be observed.
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

    def observe(self, path: np.ndarray, trees: DraftedTrees, levels: int, num_asked: int) -> None:
        """Updates the expected number of accepted nodes, by numbers of levels and nodes, from drafted trees.

        Args:
            path: path probabilities of the trees that have drafted nodes, before pruning.
            levels: number of levels in the plan by which the trees were grown.
            num_asked: number of trees that were requested.
        """
        num_trees, width = path.shape
        self._num_asked += 1
        self._answered += max(FADE, 1.0 / self._num_asked) * (num_trees / num_asked - self._answered)
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
            elif limit <= levels:  # the growth rule stopped before this level
                gain = last
            else:  # levels not requested: assume that gains decrease, and that no node is likelier than the best node
                gain = np.minimum(last + self._onward * (last - before), np.arange(self.num_nodes) * last[1])
            before, last = last, gain
            self._gain[limit] += weight * (gain - self._gain[limit])
            self._grown[limit] += weight * ((limit if limit > levels else min(limit, deepest)) - self._grown[limit])

    def stats(self, expected_accepted: float, num_accepted: int) -> PolicyStats:
        """Returns the statistics of the decisions so far."""
        return PolicyStats(
            decisions=dict(self._decisions),
            levels=self._now.levels,
            expected_speedup=round(self._token_s[0] / self._token_s[1], 3) if self._now.levels else 1.0,
            expected_accepted=round(expected_accepted, 1),
            num_accepted=num_accepted,
            break_even=self._break_even,
            costs_s=self.costs.by_batch(self.max_levels, self.num_nodes),
        )
