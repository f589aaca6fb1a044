"""The speculation policy at work in an engine: plans drafts, prunes what arrives, learns from rounds.

Nobody waits to look at trees on a device: the plan says how many nodes of each are verified, the device picks those,
and what it picked from comes with the tokens.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.engine.speculation import Speculation, Trees
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.round.pruning import DevicePruner
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import (
    OF_TEXT,
    Acceptance,
    along_rows,
    path_probabilities,
    unpack_evidence,
)
from wingbeat.runtime.speculation.following import Following
from wingbeat.runtime.speculation.policy import HOLD, DraftPlan, PolicyStats, Reason, SpeculationPolicy

NOT_ASKED = DraftPlan(0, Reason.IDLE)


class LaunchedRound(NamedTuple):
    """What is remembered of a round until it is settled."""

    plan: DraftPlan
    """That its trees were grown by."""
    num_decodes: int
    kinds: list[int]
    """By decode: the row of `Acceptance.table`."""
    certain: list[bool]
    """By decode: whether what came next was certain, which says nothing of the drafter."""
    seen: Any = None
    """Numbers that another kind of round has seen of the trees."""


class AdaptiveSpeculation(Speculation):
    """Glue between an engine's rounds and a `SpeculationPolicy`.

    Args:
        pruner: chooses the nodes on the device.
    """

    fixed_widths = True
    """Whether rounds verify one of a few numbers of nodes per tree, which is decided before the trees are there."""

    def __init__(self, policy: SpeculationPolicy, pruner: DevicePruner | None = None) -> None:
        self.policy = policy
        self.acceptance, self._following = Acceptance(), Following()
        self._pruner = pruner
        self._plan = NOT_ASKED
        self._pruned: LaunchedRound | None = None
        """The round that is being launched."""
        self._launched: deque[LaunchedRound] = deque()
        self._num_drafted = 0

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """As the policy says."""
        num_reqs = max(len(running), len(proposals))
        forced = any(seq.request.params.force_drafts for seq in proposals)
        context = mean_context(running if num_unfollowed else proposals or running)
        self._plan = self.policy.plan(num_reqs, len(proposals), context, forced, num_unfollowed, num_rounds)
        if self._plan.reason != Reason.IDLE:
            self._following.decided(self.policy.pays, num_rounds)
        return self._plan

    def made_of_text(self) -> DraftPlan:
        """As the policy counts it."""
        self._plan = self.policy.made_of_text()
        return self._plan

    def text_table(self) -> np.ndarray:
        """As was accepted of such trees."""
        return self.acceptance.table[OF_TEXT:]

    @property
    def text_pays(self) -> bool:
        """As the policy says."""
        return self.policy.text_pays

    @property
    def is_probing(self) -> bool:
        """As the policy says."""
        return self.policy.is_probing

    def node_price(self, running: list[Sequence]) -> float:
        """By the policy's costs; where shapes are fixed, they are taken."""
        return 0.0 if self.fixed_widths else self.policy.node_price(len(running), mean_context(running))

    def slow_down(self, running: list[Sequence], num_drafting: int) -> float | None:
        """By the policy's costs."""
        if not (self.policy.pays or self.policy.probe_is_due):
            return None
        return self.policy.slow_down(len(running), num_drafting, mean_context(running))

    def to_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        """All, unless plain decoding has been better for long; then one, if nobody could be drafted for since."""
        if self._following.follows_all:
            return unfollowed
        return unfollowed[:1] if self.policy.overdue() else []

    def follows_next(self) -> bool:
        """One of a few, while not all are."""
        return self._following.takes_next()

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """What its growth is judged by; 0 where every level is grown."""
        if plan.growth is None:
            return 0
        outcome.growth_limits.numpy()[:] = plan.growth
        outcome.acceptance_table.numpy()[:] = self.acceptance.table[:OF_TEXT]
        return 1

    @property
    def num_nodes(self) -> int | None:
        """As planned."""
        return self._plan.num_nodes

    def prune(self, trees: Trees, decodes: list[Sequence], drafted: Trees) -> Trees:
        """All of them: the device chooses."""
        asked = self._plan
        if drafted is None:
            asked = NOT_ASKED
            if self._plan.reason == Reason.PROBE_PLAIN:
                # Said once of one round: without a drafter nobody plans the next one.
                trees, self._plan = None, asked
        kinds = [seq.draft_kind for seq in decodes]
        self._pruned = LaunchedRound(asked, len(decodes), kinds, [bool(seq.certain(1)) for seq in decodes])
        return trees

    def launched(self, flight: RoundInFlight) -> None:
        """The round pruned last is on its way."""
        self._launched.append(self._pruned)

    def abandoned(self) -> None:
        """The rounds launched and not learned from will never be."""
        self._launched.clear()

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Learn what the round accepted."""
        this = self._launched.popleft()
        if result.evidence is not None and self._is_observed(this):
            learned = self._learn(this, result.evidence, result.path_nodes, flight.live, observes=True)
            if learned:
                self._pruner.upload(self.acceptance.table)

    def _is_observed(self, this: LaunchedRound) -> bool:
        """Whether it is seen what the trees of this round are worth; asked once of each that has some.

        That costs more to learn than to use: behind the first few rounds, one for each plan says enough.
        """
        self._num_drafted += 1
        count = self._num_drafted
        return this.plan.reason == Reason.PROBE_DRAFT or count <= HOLD**2 or count % HOLD == 0

    def _learn(
        self, this: LaunchedRound, evidence: np.ndarray, path_nodes: np.ndarray, live: list[bool], *, observes: bool
    ) -> bool:
        """Count what was accepted; False where the round says nothing of the drafter.

        Args:
            path_nodes: as `RoundResult.path_nodes`.
            live: by decode, and more.
            observes: see what the trees are worth by that, too.
        """
        trees, kept = unpack_evidence(evidence)
        rows = np.array(live[: this.num_decodes]) & ~np.array(this.certain) & trees.real.any(axis=1)
        if not rows.any():
            return False
        kept, kinds, trees = kept[rows], np.array(this.kinds)[rows], trees.rows(rows)
        own = kinds < OF_TEXT
        if observes and own.any():
            drafted = trees.rows(own)
            path = path_probabilities(self.acceptance.table[kinds[own]], drafted)
            self.policy.observe(path, drafted, this.plan.levels)
        on_path = _before_pruning(path_nodes[rows], kept)
        tried = kept & along_rows(on_path, trees.parents)
        self.acceptance.record(trees, kinds, tried, tried & on_path)
        return True

    def stats(self) -> PolicyStats:
        """Decisions so far."""
        return self.policy.stats(self.acceptance.expected_accepted, self.acceptance.num_accepted)


def _before_pruning(path_nodes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Nodes on the accepted path, bool [num_reqs, num_nodes], from their numbers in the pruned tree."""
    stays = kept.copy()
    stays[:, 0] = True
    on_path = np.zeros(kept.shape, dtype=bool)
    np.put_along_axis(on_path, path_nodes, True, axis=1)
    return stays & along_rows(on_path, np.cumsum(stays, axis=1) - 1)


def mean_context(seqs: list[Sequence]) -> float:
    """Tokens per sequence, as far as the host knows."""
    return sum(len(seq.token_ids) for seq in seqs) / len(seqs) if seqs else 0.0
