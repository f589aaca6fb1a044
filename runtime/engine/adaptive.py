"""The speculation policy at work in an engine: plans drafts, prunes what arrives, learns from rounds.

Where trees lie on the host their nodes are chosen once they are there. On a device nobody waits to look at them: the
plan says how many nodes of each are verified, the device picks those, and what it picked from comes with the tokens.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome, TokenTree
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import Acceptance, DraftedTrees, path_probabilities
from wingbeat.runtime.speculation.policy import DraftPlan, PolicyStats, Reason, SpeculationPolicy
from wingbeat.runtime.verifier.pruning import DevicePruner, keep_nodes, unpack_evidence
from wingbeat.runtime.verifier.round import RoundInFlight, RoundResult

_LEARN_ALWAYS, _LEARN_EVERY = 64, 8
"""Rounds: learning costs more than deciding, and after the first few every eighth round says enough."""


class _Round(NamedTuple):
    """What is remembered of a round until it is settled."""

    plan: DraftPlan
    """That its trees were grown by."""
    num_decodes: int
    context: float
    kinds: np.ndarray
    """int64 [num_decodes]: 1 where the temperature is above 0, the row of `Acceptance.table`."""
    num_context_tokens: int
    """That the drafter took in before it grew the trees."""
    trees: DraftedTrees | None = None
    """Before pruning, where the host has seen them."""
    kept: np.ndarray | None = None
    """bool [num_decodes, num_nodes]: drafted nodes that were verified, likewise."""


class AdaptiveSpeculation(Speculation):
    """Glue between an engine's rounds and a `SpeculationPolicy`.

    Args:
        pruner: chooses the nodes on the device; None where the trees lie on the host.
    """

    def __init__(self, policy: SpeculationPolicy, pruner: DevicePruner | None = None) -> None:
        self.policy = policy
        self.acceptance = Acceptance()
        self._pruner = pruner
        self._plan = DraftPlan(0, Reason.IDLE)
        self._num_context_tokens = 0
        self._pruned: _Round | None = None
        """The round that is being launched."""
        self._launched: deque[_Round] = deque()
        self._num_drafted = 0

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """Costs are known."""

    def plan(self, running: list[Sequence], proposals: list[Sequence]) -> DraftPlan:
        """As the policy says."""
        num_reqs = max(len(running), len(proposals))
        self._plan = self.policy.plan(num_reqs, len(proposals), _mean_context(proposals or running))
        return self._plan

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

    def prune(self, trees: TokenTree | None, decodes: list[Sequence]) -> TokenTree | None:
        """Leave the nodes that are worth their time, where the trees are on the host; None where none is."""
        kinds = np.array([seq.request.params.temperature > 0 for seq in decodes], dtype=np.int64)
        asked = self._plan if trees is not None else DraftPlan(0, Reason.IDLE)
        this = _Round(asked, len(decodes), _mean_context(decodes), kinds, self._num_context_tokens)
        if trees is not None and self._pruner is None:
            trees, this = self._choose(trees, decodes, this)
        self._pruned = this
        return trees

    def _choose(self, trees: TokenTree, decodes: list[Sequence], this: _Round) -> tuple[TokenTree | None, _Round]:
        parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
        drafted = DraftedTrees.of_scores(*(part.numpy() for part in parts), self.policy.max_levels)
        path = path_probabilities(self.acceptance.table[this.kinds], drafted)
        useful = np.array([_useful_depth(seq) for seq in decodes])
        within = drafted.real & (drafted.depths <= useful[:, None])
        kept = self.policy.choose_nodes(path, within, this.num_decodes, this.context)
        this = this._replace(trees=drafted, kept=kept)
        if not kept.any():
            return None, this
        if int(kept.sum()) == int(trees.num_valid.sum()) - len(kept):
            return trees, this
        return keep_nodes(trees, torch.from_numpy(kept), 1 + int(kept.sum(axis=1).max())), this

    def launched(self, flight: RoundInFlight) -> None:
        """The round pruned last is on its way."""
        self._launched.append(self._pruned)

    def abandoned(self) -> None:
        """The rounds launched and not learned from will never be."""
        self._launched.clear()

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Learn what the round accepted and, where the host's clock tells, what it took."""
        this = self._launched.popleft()
        if result.evidence is not None:
            trees, kept = unpack_evidence(result.evidence)
            this = this._replace(trees=trees, kept=kept)
        if this.trees is not None:
            self._num_drafted += 1
            often = self._num_drafted <= _LEARN_ALWAYS or this.plan.reason == Reason.PROBE_DRAFT
            if often or self._num_drafted % _LEARN_EVERY == 0:
                self._learn(this, result, np.array(flight.live[: this.num_decodes]))
        if self._pruner is None and this.num_decodes:
            self._observe(this, flight)

    def _learn(self, this: _Round, result: RoundResult, live: np.ndarray) -> None:
        rows = live & this.trees.real.any(axis=1)
        if not rows.any():
            return
        kept, kinds, trees = this.kept[rows], this.kinds[rows], this.trees.rows(rows)
        on_path = _before_pruning(result.path_nodes[rows], kept)
        tried = kept & np.take_along_axis(on_path, trees.parents, axis=1)
        self.policy.observe(path_probabilities(self.acceptance.table[kinds], trees), trees, this.plan.levels)
        self.acceptance.record(trees, kinds, tried, tried & on_path)
        if self._pruner is not None:
            self._pruner.upload(self.acceptance.table)

    def _observe(self, this: _Round, flight: RoundInFlight) -> None:
        costs, times = self.policy.costs, flight.times
        num_extra = 0
        if this.trees is not None and this.trees.real.any():
            num_extra, num_drafting = int(this.kept.sum()), int(this.trees.real.any(axis=1).sum())
            levels = int(np.where(this.trees.real, this.trees.depths, 0).max())
            costs.observe_draft(times.draft_s, num_drafting, levels, this.num_context_tokens)
        num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks)
        seconds = times.forward_s + times.host_s + times.publish_s
        costs.observe_verify(seconds, this.num_decodes, num_extra, this.context, num_chunk_tokens=num_chunk_tokens)

    def stats(self) -> PolicyStats:
        """Decisions so far."""
        return self.policy.stats(self.acceptance.expected_accepted, self.acceptance.num_accepted)


def _useful_depth(seq: Sequence) -> int:
    """Levels of a tree that can be emitted before the request has all of its tokens; the last one is the bonus."""
    return max(seq.request.params.max_tokens - (seq.min_len - seq.num_prompt_tokens) - 1, 0)


def _before_pruning(path_nodes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Nodes on the accepted path, bool [num_reqs, num_nodes], from their numbers in the pruned tree."""
    stays = kept.copy()
    stays[:, 0] = True
    on_path = np.zeros(kept.shape, dtype=bool)
    np.put_along_axis(on_path, path_nodes, True, axis=1)
    return stays & np.take_along_axis(on_path, np.cumsum(stays, axis=1) - 1, axis=1)


def _mean_context(seqs: list[Sequence]) -> float:
    """Tokens per sequence, as far as the host knows."""
    return sum(len(seq.token_ids) for seq in seqs) / len(seqs) if seqs else 0.0
