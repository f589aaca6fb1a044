"""The speculation policy at work in an engine: plans drafts, prunes what arrives, learns from rounds.

Where trees lie on the host their nodes are chosen once they are there. On a device nobody waits to look at them: the
plan says how many nodes of each are verified, the device picks those, and what it picked from comes with the tokens.
"""

import logging
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from wingbeat.kernels.cpu.drafted import DraftIntake, Prices
from wingbeat.runtime.engine.kept_times import KeptTimes
from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome, TokenTree
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.round.pruning import DevicePruner, first_nodes, keep_nodes, unpack_evidence
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import (
    EDGES,
    Acceptance,
    DraftedTrees,
    along_rows,
    path_probabilities,
)
from wingbeat.runtime.speculation.costs import DraftTook, RoundTook
from wingbeat.runtime.speculation.following import Following
from wingbeat.runtime.speculation.policy import DraftPlan, PolicyStats, Reason, SpeculationPolicy

logger = logging.getLogger(__name__)

_LEARN_ALWAYS, _LEARN_EVERY = 64, 8
"""Rounds: learning costs more than deciding, and after the first few every eighth round says enough."""
_COUNT_ALWAYS, _COUNT_EVERY = 256, 2
"""Likewise for counting what was accepted, the cheaper half, on the host: believing in a weak head costs more."""


_NOBODY = np.zeros(0, dtype=np.int64)


class _Round(NamedTuple):
    """What is remembered of a round until it is settled."""

    plan: DraftPlan
    """That its trees were grown by."""
    num_decodes: int
    context: float
    kinds: np.ndarray
    """int64 [num_decodes]: 1 where the temperature is above 0, the row of `Acceptance.table`; empty where there are no
    trees, as the next one."""
    certain: np.ndarray
    """bool [num_decodes]: whether what came next was certain, which says nothing of the drafter."""
    num_drafting: int
    """Sequences that the drafter brought a tree for, where the host has seen it; as the next one."""
    levels: int
    """Of the drafter's trees."""
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
        kept: corrects the times on disk that the costs were made of, where the host's clock tells.
        intake: chooses the nodes on the host; None leaves that to numpy.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        pruner: DevicePruner | None = None,
        kept: KeptTimes | None = None,
        intake: DraftIntake | None = None,
    ) -> None:
        self.policy = policy
        self.acceptance, self._following = Acceptance(), Following()
        self._pruner, self._kept, self._intake = pruner, kept, intake
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

    def plan(self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0) -> DraftPlan:
        """As the policy says."""
        num_reqs, forced = max(len(running), len(proposals)), any(map(_is_forced, proposals))
        context = _mean_context(running if num_unfollowed else proposals or running)
        self._plan = self.policy.plan(num_reqs, len(proposals), context, forced, num_unfollowed)
        self._asks = bool(self._plan.levels)
        if self._plan.reason != Reason.IDLE:
            self._following.decided(self.policy.pays)
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

    def prune(self, trees: TokenTree | None, decodes: list[Sequence], drafted: TokenTree | None) -> TokenTree | None:
        """Leave the nodes that are worth their time, where the trees are on the host; None where none is."""
        kinds = certain = _NOBODY
        if trees is not None or self._pruner is not None:
            kinds = np.array([seq.request.params.temperature > 0 for seq in decodes], dtype=np.int64)
            certain = np.array([bool(seq.certain(1)) for seq in decodes], dtype=bool)
        asked, num_drafting, levels = DraftPlan(0, Reason.IDLE), 0, 0
        self._asks = False
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

    def _choose(self, trees: TokenTree, decodes: list[Sequence], this: _Round) -> tuple[TokenTree | None, _Round]:
        useful = np.array([_useful_depth(seq) for seq in decodes])
        forced = np.array([_is_forced(seq) for seq in decodes])
        if self._intake is not None:
            pruned, this = self._choose_by_kernel(self._intake, trees, useful, forced, this)
        else:
            parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
            drafted = DraftedTrees.of_scores(*(part.numpy() for part in parts), self.policy.max_levels)
            path = path_probabilities(self.acceptance.table[this.kinds], drafted)
            within = drafted.real & (drafted.depths <= useful[:, None])
            kept = self.policy.choose_nodes(path, within, this.num_decodes, this.context)
            this = this._replace(trees=drafted, kept=kept | (within & forced[:, None]))
            pruned = _pruned(trees, this.kept)
        return (pruned if this.kept.any() else None), this

    def _choose_by_kernel(
        self, intake: DraftIntake, trees: TokenTree, useful: np.ndarray, forced: np.ndarray, this: _Round
    ) -> tuple[TokenTree, _Round]:
        prices = self.policy.prices(this.num_decodes, trees.token_ids.numel(), this.context)
        by, most = (self.acceptance.table, EDGES, prices), self.policy.max_levels
        table, edges, tokens = (None if part is None else torch.from_numpy(part) for part in by)
        kinds, levels = torch.from_numpy(this.kinds), torch.from_numpy(useful)
        also = torch.from_numpy(forced) if forced.any() else None
        chosen = intake.choose(tuple(trees), kinds, levels, also, Prices(table, edges, tokens), most)
        up, depths = np.maximum(trees.parents.numpy(), 0), np.minimum(trees.depths.numpy(), most)
        drafted = DraftedTrees(up, depths, chosen.log_probs.numpy(), chosen.real.numpy())
        return TokenTree(*chosen.trees), this._replace(trees=drafted, kept=chosen.kept.numpy())

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
            probed, count = this.plan.reason == Reason.PROBE_DRAFT, self._num_drafted
            learns = probed or count <= _LEARN_ALWAYS or count % _LEARN_EVERY == 0
            counts = self._pruner is None and (count <= _COUNT_ALWAYS or count % _COUNT_EVERY == 0)
            if learns or counts:
                self._learn(this, result, np.array(flight.live[: this.num_decodes]), whole=learns)
        if self._pruner is None and this.num_decodes:
            self._observe(this, flight, sum(result.num_valid) - len(result.num_valid))

    def _learn(self, this: _Round, result: RoundResult, live: np.ndarray, whole: bool) -> None:
        """Count what was accepted; as a whole, also see what trees are worth by that.

        Args:
            live: bool [num_decodes].
        """
        rows = live & this.trees.real.any(axis=1) & ~this.certain
        if not rows.any():
            return
        kept, kinds, trees = this.kept[rows], this.kinds[rows], this.trees.rows(rows)
        on_path = _before_pruning(result.path_nodes[rows], kept)
        tried = kept & along_rows(on_path, trees.parents)
        if whole:
            self.policy.observe(path_probabilities(self.acceptance.table[kinds], trees), trees, this.plan.levels)
        self.acceptance.record(trees, kinds, tried, tried & on_path)
        if whole and self._pruner is not None:
            self._pruner.upload(self.acceptance.table)

    def _observe(self, this: _Round, flight: RoundInFlight, num_extra: int) -> None:
        costs, times, draft = self.policy.costs, flight.times, None
        if this.plan.levels:
            draft = DraftTook(times.draft_s, this.num_drafting, this.levels, this.num_context_tokens)
        num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks)
        seconds = times.forward_s + times.host_s + times.publish_s
        took = RoundTook(seconds, this.num_decodes, num_extra, this.context, num_chunk_tokens, draft, self._asks)
        costs.observe(took)
        if self._kept is not None and not num_chunk_tokens and self._kept.wants():
            table_s = costs.one_pass_s(this.num_decodes, num_extra, this.context)
            self._kept.observe(times.forward_s, table_s, this.num_decodes + num_extra)

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
