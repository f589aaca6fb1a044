"""The speculation policy at work in an engine: plans drafts, prunes what arrives, learns from rounds.

Where trees lie on the host their nodes are chosen once they are there. On a device nobody waits to look at them: the
plan says how many nodes of each are verified, the device picks those, and what it picked from comes with the tokens.
"""

import logging
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from wingbeat.kernels.cpu.drafted import NodeChoice
from wingbeat.runtime.engine.speculation import AnyTrees, Speculation
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome, TokenTree
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.round.pruning import DevicePruner, first_nodes, keep_nodes
from wingbeat.runtime.round.rows import Decodes
from wingbeat.runtime.round.tree_check import ArrivedTrees
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import (
    EDGES,
    Acceptance,
    DraftedTrees,
    along_rows,
    pack_evidence,
    path_probabilities,
    unpack_evidence,
)
from wingbeat.runtime.speculation.curves import DraftTook, RoundTook
from wingbeat.runtime.speculation.following import Following
from wingbeat.runtime.speculation.policy import DraftPlan, PolicyStats, Reason, SpeculationPolicy

logger = logging.getLogger(__name__)

LEARN_EVERY = 8
"""Rounds: what trees are worth costs more to learn than to use, and behind the first few every eighth says enough."""

_NOT_ASKED = DraftPlan(0, Reason.IDLE)


class _Round(NamedTuple):
    """What is remembered of a round until it is settled."""

    plan: DraftPlan
    """That its trees were grown by."""
    num_decodes: int
    context: float
    kinds: list[int]
    """By decode: 1 where the temperature is above 0, the row of `Acceptance.table`; empty where there are no trees, as
    the next one."""
    certain: list[bool]
    """By decode: whether what came next was certain, which says nothing of the drafter."""
    num_drafting: int
    """Sequences that the drafter brought a tree for, where the host has seen it; as the next one."""
    levels: int
    """Of the drafter's trees."""
    num_context_tokens: int
    """That the drafter took in before it grew the trees."""
    evidence: np.ndarray | None = None
    """As `RoundResult.evidence`, where the host has seen the trees."""


class AdaptiveSpeculation(Speculation):
    """Glue between an engine's rounds and a `SpeculationPolicy`.

    Args:
        pruner: chooses the nodes on the device; None where the trees lie on the host.
    """

    def __init__(self, policy: SpeculationPolicy, pruner: DevicePruner | None = None) -> None:
        self.policy = policy
        self.acceptance, self._following = Acceptance(), Following()
        self._pruner = pruner
        self._by = torch.from_numpy(self.acceptance.table), torch.from_numpy(EDGES)
        self._plan = DraftPlan(0, Reason.IDLE)
        self._num_context_tokens = 0
        self._pruned: _Round | None = None
        """The round that is being launched."""
        self._launched: deque[_Round] = deque()
        self._num_drafted = 0
        self._asks = False
        """Whether the next round's draft was asked for beside this round."""

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """Costs are known."""

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """As the policy says."""
        num_reqs, forced = max(len(running), len(proposals)), any(map(_is_forced, proposals))
        context = _mean_context(running if num_unfollowed else proposals or running)
        self._plan = self.policy.plan(num_reqs, len(proposals), context, forced, num_unfollowed, num_rounds)
        self._asks = bool(self._plan.levels)
        if self._plan.reason != Reason.IDLE:
            self._following.decided(self.policy.pays, num_rounds)
        return self._plan

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
        self._num_context_tokens = num_context_tokens
        if plan.growth is None:
            return 0
        outcome.growth_limits.numpy()[:] = plan.growth
        outcome.acceptance_table.numpy()[:] = self.acceptance.table
        return 1

    @property
    def num_nodes(self) -> int | None:
        """As planned."""
        return self._plan.num_nodes

    def prune(self, trees: AnyTrees, decodes: list[Sequence], drafted: AnyTrees) -> TokenTree | Decodes | None:
        """Leave the nodes that are worth their time, where the trees are on the host; None where none is."""
        self._asks = False
        if isinstance(trees, ArrivedTrees):
            return self._take(trees, decodes)
        kinds, certain = [], []
        if trees is not None or self._pruner is not None:
            kinds = [int(seq.request.params.temperature > 0) for seq in decodes]
            certain = [bool(seq.certain(1)) for seq in decodes]
        asked, num_drafting, levels = _NOT_ASKED, 0, 0
        if drafted is not None:
            asked = self._plan
            if self._pruner is None:
                num_drafting, levels = _grown(drafted)
        elif self._plan.reason == Reason.PROBE_PLAIN:
            # Said once of one round: without a drafter nobody plans the next one.
            trees, self._plan = None, asked
        context = _mean_context(decodes)
        this = _Round(asked, len(decodes), context, kinds, certain, num_drafting, levels, self._num_context_tokens)
        if trees is not None and self._pruner is None:
            trees, this = self._choose(trees, decodes, this)
        self._pruned = this
        return trees

    def _take(self, arrived: ArrivedTrees, decodes: list[Sequence]) -> Decodes | None:
        """`prune` of trees that our kernels look at, of sequences whose next token is never certain."""
        context, num_reqs = _mean_context(decodes), len(decodes)
        prices = self.policy.prices(num_reqs, num_reqs * arrived.num_nodes, context)
        forced, useful = list(map(_is_forced, decodes)), list(map(_useful_depth, decodes))
        tokens = None if prices is None else torch.from_numpy(prices)
        taken = arrived.taken(NodeChoice(*self._by, tokens, useful, forced, self.policy.max_levels))
        if taken is None:
            self._pruned = _Round(_NOT_ASKED, num_reqs, context, [], [], 0, 0, self._num_context_tokens)
            return None
        self._pruned = _Round(
            self._plan,
            num_reqs,
            context,
            [int(seq.request.params.temperature > 0) for seq in decodes],
            [False] * num_reqs,
            taken.num_drafting,
            taken.levels,
            self._num_context_tokens,
            taken.evidence.numpy(),
        )
        return None if taken.is_bare else arrived.decodes(taken)

    def _choose(self, trees: TokenTree, decodes: list[Sequence], this: _Round) -> tuple[TokenTree | None, _Round]:
        useful = np.array([_useful_depth(seq) for seq in decodes])
        forced = np.array([_is_forced(seq) for seq in decodes])
        parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
        drafted = DraftedTrees.of_scores(*(part.numpy() for part in parts), self.policy.max_levels)
        path = path_probabilities(self.acceptance.table[this.kinds], drafted)
        within = drafted.real & (drafted.depths <= useful[:, None])
        kept = self.policy.choose_nodes(path, within, this.num_decodes, this.context) | (within & forced[:, None])
        this = this._replace(evidence=pack_evidence(drafted, kept))
        return (_pruned(trees, kept) if kept.any() else None), this

    def launched(self, flight: RoundInFlight) -> None:
        """The round pruned last is on its way."""
        self._launched.append(self._pruned)

    def abandoned(self) -> None:
        """The rounds launched and not learned from will never be."""
        self._launched.clear()

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Learn what the round accepted and, where the host's clock tells, what it took."""
        this = self._launched.popleft()
        evidence = this.evidence if result.evidence is None else result.evidence
        if evidence is not None:
            self._num_drafted += 1
            probed, count = this.plan.reason == Reason.PROBE_DRAFT, self._num_drafted
            learns = probed or count <= LEARN_EVERY**2 or count % LEARN_EVERY == 0
            if learns or self._pruner is None:
                self._learn(this, evidence, result.path_nodes, flight.live, whole=learns)
        if self._pruner is None and this.num_decodes:
            self._observe(this, flight, sum(result.num_valid) - len(result.num_valid))

    def _learn(self, this: _Round, evidence: np.ndarray, path_nodes: np.ndarray, live: list[bool], whole: bool) -> None:
        """Count what was accepted; as a whole, also see what trees are worth by that.

        Args:
            path_nodes: as `RoundResult.path_nodes`.
            live: by decode, and more.
        """
        trees, kept = unpack_evidence(evidence)
        rows = np.array(live[: this.num_decodes]) & ~np.array(this.certain) & trees.real.any(axis=1)
        if not rows.any():
            return
        kept, kinds, trees = kept[rows], np.array(this.kinds)[rows], trees.rows(rows)
        if whole:
            path = path_probabilities(self.acceptance.table[kinds], trees)
            self.policy.observe(path, trees, this.plan.levels)
        on_path = _before_pruning(path_nodes[rows], kept)
        tried = kept & along_rows(on_path, trees.parents)
        self.acceptance.record(trees, kinds, tried, tried & on_path)
        if self._pruner is not None:
            self._pruner.upload(self.acceptance.table)

    def _observe(self, this: _Round, flight: RoundInFlight, num_extra: int) -> None:
        times, draft = flight.times, None
        if this.plan.levels:
            draft = DraftTook(times.draft_s, this.num_drafting, this.levels, this.num_context_tokens)
        num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks)
        seconds = times.forward_s + times.host_s + times.publish_s
        took = RoundTook(seconds, this.num_decodes, num_extra, this.context, num_chunk_tokens, draft, self._asks)
        self.policy.costs.observe(took)

    def stats(self) -> PolicyStats:
        """Decisions so far."""
        return self.policy.stats(self.acceptance.expected_accepted, self.acceptance.num_accepted)


def _is_forced(seq: Sequence) -> bool:
    return seq.request.params.force_drafts


def _useful_depth(seq: Sequence) -> int:
    """Levels of a tree that can be emitted before the request has all of its tokens; the last one is the bonus."""
    return max(seq.request.params.max_tokens - (seq.min_len - seq.num_prompt_tokens) - 1, 0)


def _pruned(trees: TokenTree, kept: np.ndarray) -> TokenTree:
    """The trees with only their kept nodes."""
    num_valid = 1 + kept.sum(axis=1)
    if np.array_equal(num_valid, trees.num_valid.numpy()):
        return trees
    width = int(num_valid.max())
    if (kept[:, 2:] > kept[:, 1:-1]).any():
        return keep_nodes(trees, torch.from_numpy(kept), width)
    return first_nodes(trees, torch.from_numpy(num_valid), width)


def _grown(drafted: TokenTree) -> tuple[int, int]:
    """Trees with a node, and the depth of the deepest one; what does not count in a checked tree has depth 0."""
    return int((drafted.num_valid.numpy() > 1).sum()), int(drafted.depths.numpy().max())


def _before_pruning(path_nodes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Nodes on the accepted path, bool [num_reqs, num_nodes], from their numbers in the pruned tree."""
    stays = kept.copy()
    stays[:, 0] = True
    on_path = np.zeros(kept.shape, dtype=bool)
    np.put_along_axis(on_path, path_nodes, True, axis=1)
    return stays & along_rows(on_path, np.cumsum(stays, axis=1) - 1)


def _mean_context(seqs: list[Sequence]) -> float:
    """Tokens per sequence, as far as the host knows."""
    return sum(len(seq.token_ids) for seq in seqs) / len(seqs) if seqs else 0.0
