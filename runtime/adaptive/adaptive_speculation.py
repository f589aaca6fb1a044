"""Applies the speculation policy in an engine: plans drafts, prunes trees, records acceptance of settled rounds.

In rounds on a device, the host never waits to read trees: the plan sets how many nodes of each tree are verified, and
the device picks the nodes. The evidence (probabilities of all nodes) is downloaded with the accepted tokens.
"""

from collections import deque
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.adaptive.acceptance import (
    OF_TEXT,
    Acceptance,
    along_rows,
    draft_kind,
    path_probabilities,
    unpack_evidence,
)
from wingbeat.runtime.adaptive.policy import HOLD, SpeculationPolicy
from wingbeat.runtime.adaptive.pruning import DevicePruner
from wingbeat.runtime.engine.speculation import DraftPlan, PolicyStats, Reason, Speculation, Trees
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.scheduling.sequence import Sequence

_TREE_REQUESTED = attrgetter("draft.tree_requested")
NOT_ASKED = DraftPlan(0, Reason.IDLE)
SURE = 12 * HOLD
"""Lead of plain decoding, in rounds, from which requests are no longer followed. A round in which drafts would not pay
adds 1 to the lead; a round in which drafts would pay subtracts 4."""
ONE_OF = 2 * HOLD
"""While plain decoding is faster, the drafter follows one request out of this many."""


class Following:
    """Selects the requests that a drafter follows: all requests, or a few while plain decoding is faster.

    Following a request costs time even without drafting, because the drafter processes the request's prompt and tokens;
    on CPUs, this work uses the verifier's cores. A few requests are nevertheless always followed, because otherwise no
    probe could show that drafts pay again. The selection depends only on the policy's decisions and a count of
    requests.
    """

    def __init__(self) -> None:
        self.follows_all = True
        """Whether every request that allows drafts is followed."""
        self._ahead = 0
        """Lead of plain decoding, in rounds, from 0 to `SURE`."""
        self._left = 0
        """Number of requests until the next request that is followed, while not all requests are followed."""

    def decided(self, pays: bool, num_rounds: int = 1) -> None:
        """Records `num_rounds` rounds, and whether drafting for all requests would have paid in these rounds."""
        self._ahead = min(max(self._ahead + (-4 if pays else 1) * num_rounds, 0), SURE)
        if self._ahead == SURE:
            self.follows_all = False
        elif not self._ahead:
            self.follows_all, self._left = True, 0

    def takes_next(self) -> bool:
        """Returns whether to follow the request that is being admitted; called once per request."""
        if self.follows_all:
            return True
        self._left = (self._left or ONE_OF) - 1
        return self._left == ONE_OF - 1


class LaunchedRound(NamedTuple):
    """State of a launched round that is needed once the round is settled."""

    plan: DraftPlan
    """Plan by which the drafter grew the round's trees."""
    num_decodes: int
    kinds: list[int]
    """Row of `Acceptance.table` that applies to each decode's tree."""
    certain: list[bool]
    """Whether each decode's next token was certain (forced by its grammar); accepting such a token is no evidence about
    the drafter."""
    asked: list[bool]
    """Whether each decode's tree was requested from the drafter."""
    seen: Any = None
    """Trees as recorded at launch, if the round kind has the trees on the host; None in device rounds."""


class AdaptiveSpeculation(Speculation):
    """Connects an engine's rounds to a `SpeculationPolicy`.

    Args:
        pruner: pruner that chooses the nodes of trees on the device; None if the host chooses.
    """

    fixed_widths = True
    """Whether rounds verify one of a few fixed numbers of nodes per tree, decided before the trees arrive."""

    def __init__(self, policy: SpeculationPolicy, pruner: DevicePruner | None = None) -> None:
        self.policy = policy
        self.acceptance, self._following = Acceptance(), Following()
        self._pruner = pruner
        self._plan = NOT_ASKED
        self._pruned = LaunchedRound(NOT_ASKED, 0, [], [], [])
        """State of the round that is being launched, from `prune` to `launched`."""
        self._launched: deque[LaunchedRound] = deque()
        self._num_drafted = 0

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """Returns the policy's plan for the next draft."""
        num_reqs = max(len(running), len(proposals))
        forced = any(seq.request.params.force_drafts for seq in proposals)
        context = mean_context(running if num_unfollowed else proposals or running)
        self._plan = self.policy.plan(num_reqs, len(proposals), context, forced, num_unfollowed, num_rounds)
        if self._plan.reason != Reason.IDLE:
            self._following.decided(self.policy.pays, num_rounds)
        return self._plan

    def made_of_text(self) -> DraftPlan:
        """Returns the policy's plan for a round of text trees."""
        self._plan = self.policy.made_of_text()
        return self._plan

    def text_table(self) -> np.ndarray:
        """Measured acceptance of text trees."""
        return self.acceptance.table[OF_TEXT:]

    @property
    def text_pays(self) -> bool:
        """See `SpeculationPolicy.text_pays`."""
        return self.policy.text_pays

    @property
    def is_probing(self) -> bool:
        """See `SpeculationPolicy.is_probing`."""
        return self.policy.is_probing

    def text_prices(self, running: list[Sequence], most: int) -> np.ndarray | None:
        """See `Speculation.text_prices`; None in rounds of fixed width, whose number of nodes does not change."""
        return None if self.fixed_widths else self.policy.text_prices(len(running), most, mean_context(running))

    def slow_down(self, running: list[Sequence], num_drafting: int) -> float | None:
        """See `Speculation.slow_down`; the ratio follows from the policy's measured costs."""
        if not (self.policy.pays or self.policy.probe_is_due):
            return None
        return self.policy.slow_down(len(running), num_drafting, mean_context(running))

    def may_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """Returns all unfollowed sequences while plain decoding is faster; else those whose replay is worth its time.

        A sequence is expected to emit as many further tokens as it has emitted, if its request allows as many.
        """
        if not self._following.follows_all:
            return unfollowed
        return [
            seq
            for seq in unfollowed
            if self.policy.replay_pays(
                len(seq.token_ids), min(seq.num_output_tokens, seq.num_tokens_at_most - len(seq.token_ids))
            )
        ]

    def to_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """Returns the sequences of `may_follow`.

        Once plain decoding has been faster for a long time, returns only the sequence with the fewest tokens if a probe
        is overdue, else none.
        """
        if self._following.follows_all:
            return self.may_follow(unfollowed)
        return [min(unfollowed, key=lambda seq: len(seq.token_ids))] if self.policy.overdue() else []

    def follows_next(self) -> bool:
        """True for every request.

        Once plain decoding has been faster for a long time, True for only a fraction of the requests.
        """
        return self._following.takes_next()

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """Writes the plan's growth limits and the acceptance table.

        Returns 0, having written nothing, if the plan grows every level.
        """
        if plan.growth is None:
            return 0
        outcome.growth_limits.numpy()[:] = plan.growth
        outcome.acceptance_table.numpy()[:] = self.acceptance.table[:OF_TEXT]
        return 1

    @property
    def num_nodes(self) -> int | None:
        """Number of nodes by the latest plan; see `DraftPlan.num_nodes`."""
        return self._plan.num_nodes

    def prune(self, trees: Trees, decodes: list[Sequence], drafted: Trees) -> Trees:
        """Returns the trees unchanged, because the device chooses nodes; records the round that is being launched."""
        asked = self._plan
        if drafted is None:
            asked = NOT_ASKED
            if self._plan.reason == Reason.PROBE_PLAIN:
                # A plan that probes plain decoding applies to one round only, because no later plan would replace it
                # while no drafter answers.
                trees, self._plan = None, asked
        kinds = [draft_kind(seq) for seq in decodes]
        certain = [bool(seq.certain(1)) for seq in decodes]
        wanted = [False] * len(decodes) if drafted is None else list(map(_TREE_REQUESTED, decodes))
        self._pruned = LaunchedRound(asked, len(decodes), kinds, certain, wanted)
        return trees

    def launched(self, flight: RoundInFlight) -> None:
        """Queues the state of the round pruned last."""
        self._launched.append(self._pruned)

    def abandoned(self) -> None:
        """Drops rounds that will never be settled."""
        self._launched.clear()

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Updates the acceptance statistics with the tokens that the round accepted."""
        this = self._launched.popleft()
        if result.evidence is not None and self._is_observed(this):
            learned = self._learn(this, result.evidence, result.path_nodes, flight.live, observes=True)
            if learned and self._pruner is not None:
                self._pruner.upload(self.acceptance.table)

    def _is_observed(self, this: LaunchedRound) -> bool:
        """Whether the policy observes the predicted value of this round's trees; called once per round with trees.

        Observing a round costs time and soon adds little, so after the first HOLD^2 rounds with trees only one round in
        HOLD is observed.
        """
        self._num_drafted += 1
        count = self._num_drafted
        return this.plan.reason == Reason.PROBE_DRAFT or count <= HOLD**2 or count % HOLD == 0

    def _learn(
        self, this: LaunchedRound, evidence: np.ndarray, path_nodes: np.ndarray, live: list[bool], *, observes: bool
    ) -> bool:
        """Records which nodes were accepted; returns False if the round holds no evidence about the drafter.

        Args:
            path_nodes: as `RoundResult.path_nodes`.
            live: whether each decode's result is still valid; entries past the decodes are ignored.
            observes: whether the policy also observes the trees' predicted value.
        """
        trees, kept = unpack_evidence(evidence)
        counts, kinds = np.array(live[: this.num_decodes]) & ~np.array(this.certain), np.array(this.kinds)
        has_nodes, own = trees.real.any(axis=1), (kinds < OF_TEXT) & this.asked
        if observes and (counts & own).any():
            drafted = trees.rows(counts & own & has_nodes)
            path = path_probabilities(self.acceptance.table[kinds[counts & own & has_nodes]], drafted)
            self.policy.observe(path, drafted, this.plan.levels, int((counts & own).sum()))
        rows = counts & has_nodes
        if not rows.any():
            return False
        kept, kinds, trees = kept[rows], kinds[rows], trees.rows(rows)
        on_path = _before_pruning(path_nodes[rows], kept)
        tried = kept & along_rows(on_path, trees.parents)
        self.acceptance.record(trees, kinds, tried, tried & on_path)
        return True

    def stats(self) -> PolicyStats:
        """Returns the counts of the policy's decisions so far."""
        return self.policy.stats(self.acceptance.expected_accepted, self.acceptance.num_accepted)


def _before_pruning(path_nodes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns which nodes of the unpruned trees lie on the accepted path, bool [num_reqs, num_nodes].

    `path_nodes` holds the path's node indices in the pruned trees; `kept` marks the nodes that pruning kept.
    """
    stays = kept.copy()
    stays[:, 0] = True
    on_path = np.zeros(kept.shape, dtype=bool)
    np.put_along_axis(on_path, path_nodes, True, axis=1)
    return stays & along_rows(on_path, np.cumsum(stays, axis=1) - 1)


def mean_context(seqs: list[Sequence]) -> float:
    """Mean number of tokens per sequence, counting tokens that have arrived on the host; 0 for no sequences."""
    return sum(len(seq.token_ids) for seq in seqs) / len(seqs) if seqs else 0.0
