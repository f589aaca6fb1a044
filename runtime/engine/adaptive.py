"""The speculation policy at work in an engine: prunes arriving trees, plans the next draft, learns from rounds."""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome, TokenTree
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import path_probabilities
from wingbeat.runtime.speculation.padding import num_padded_apart, worth_packing
from wingbeat.runtime.speculation.policy import DraftPlan, PolicyStats, Round, SpeculationPolicy
from wingbeat.runtime.verifier.round import RoundInFlight, RoundResult

_LEARN_ALWAYS = 64
_LEARN_EVERY = 8
"""Rounds: learning costs more than deciding, and after the first few every eighth round says enough."""
_MANY = 8
"""Sequences from which on every other of those does: each of them says something."""
_FEW = 16
"""Sequences up to which plain numbers are quicker than arrays of them."""
_FOLLOW_ONE_IN = 8
"""Sequences: where plain decoding is faster, keeping up with all of them would cost what it wins."""
_HOPELESS = -50.0
"""Log-probability of what no drafter can have meant."""


class _Trees(NamedTuple):
    """This round's trees on the host, [num_decodes, num_nodes], and what the policy thought of them."""

    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    """Conditional on the parent."""
    real: np.ndarray
    """Drafted nodes that count; roots excluded."""


class Launched(NamedTuple):
    """What is remembered of a round until its result is known."""

    trees: _Trees | None
    """As verified; None where all were bare roots."""
    learns: bool
    sampled: list[bool]
    """By decode, whether its temperature is above 0."""
    slots: list[int]
    num_decodes: int
    context: float
    num_drafting: int = 0
    levels_grown: int = 0
    num_extra: int = 0
    """Rows beside the roots: drafted nodes that were verified, and their padding where they were not packed."""
    num_padding: int = 0
    """Nodes that take part in attention alone, where trees were packed."""
    num_context_tokens: int = 0
    """Context that the drafter took in before it grew the trees."""

    def kinds_and_slots(self) -> tuple[np.ndarray, np.ndarray]:
        """`sampled` and `slots` as the policy takes them: bool and int64 [num_decodes]."""
        return np.array(self.sampled, dtype=bool), np.array(self.slots, dtype=np.int64)


class AdaptiveSpeculation(Speculation):
    """Glue between an engine's rounds and a `SpeculationPolicy`; all of it on the host.

    Every round is pruned when it is launched and learned from when its result is known, in the same order.
    """

    num_nodes: int | None = None

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy = policy
        self._chains = policy.num_nodes == policy.max_depth + 1
        self._written: dict[int, int] = {}
        """Number of the rule by buffer."""
        self._rule: tuple[DraftPlan | None, int] = (None, 0)
        """Plan and tracker's version that the rule of this number was made of."""
        self._rule_number = 0
        self._round = 0
        self._pruned: Launched | None = None
        """The round that is being launched."""
        self._launched: deque[Launched] = deque()
        self._num_passed_over = 0
        self._asked = False
        """Whether the latest plan was to draft."""
        self._num_context_tokens = 0
        """Of the latest draft."""

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """Costs are known; rules are written anew."""
        self._written.clear()

    @property
    def follows(self) -> bool:
        """Whether the drafter is to have the context of whoever it can draft for."""
        return self.policy.follows

    def admit(self, seq: Sequence) -> bool:
        """Start from the common figures. Some are followed in any case, or nothing would ever show that drafting pays
        again."""
        self.policy.tracker.admit(seq.slot)
        self._num_passed_over += 1
        if self.follows or self._num_passed_over == _FOLLOW_ONE_IN:
            self._num_passed_over = 0
            return True
        return False

    def abandoned(self) -> None:
        """The rounds launched and not learned from will never be."""
        self._launched.clear()

    def launched(self, flight: RoundInFlight) -> None:
        """The round pruned last is on its way."""
        self._launched.append(self._pruned)

    def prune(self, trees: TokenTree | None, decodes: list[Sequence]) -> TokenTree | None:
        """Leave the nodes that are worth their time; None where none is. The trees are on the host."""
        this = launched_with(decodes)
        if trees is not None:
            this = this._replace(num_context_tokens=self._num_context_tokens)
            trees, this = self._choose(trees, this, [_useful_depth(seq) for seq in decodes])
        self._pruned = this
        return trees

    def _choose(self, trees: TokenTree, this: Launched, useful: list[int]) -> tuple[TokenTree | None, Launched]:
        self._round += 1
        learns, few_chains = learns_from(self._round, this.num_decodes), self._chains and this.num_decodes <= _FEW
        if few_chains and not learns:
            return self._cut_chains(trees, this, useful)
        host = _on_host(trees, self.policy.max_depth)
        conditional = self.policy.conditional(host.log_probs, host.depths, *this.kinds_and_slots())
        levels_grown = int(host.depths.max())
        path = path_probabilities(conditional, host.parents, levels_grown)
        with_tree = host.real.any(axis=1)
        if few_chains:
            lengths = np.array(self._lengths(trees, trees.num_valid.tolist(), this, useful))
            kept = host.real & (np.arange(host.real.shape[1]) <= lengths[:, None])
        else:
            within = host.real & (host.depths <= np.array(useful)[:, None])
            kept = self.policy.choose_nodes(path, within, this.num_decodes, this.context)
        if learns:
            self.policy.observe_trees(path[with_tree], kept[with_tree], host.depths[with_tree], host.real[with_tree])
        this = this._replace(learns=learns, num_drafting=int(with_tree.sum()), levels_grown=levels_grown)
        if not kept.any():
            return None, this
        pruned, verified = _keep(trees, host, kept)
        return pruned, _with_rows(this._replace(trees=verified), pruned.num_valid.tolist())

    def _lengths(self, trees: TokenTree, lens: list[int], this: Launched, useful: list[int]) -> list[int]:
        """How much of each chain to verify; `lens` are their nodes, the root included."""
        nodes = zip(trees.scores.tolist(), lens, useful, strict=True)
        scores = [row[: min(length, deepest + 1)] for row, length, deepest in nodes]
        return self.policy.cut_chains(scores, this.sampled, this.slots, this.context)

    def _cut_chains(self, trees: TokenTree, this: Launched, useful: list[int]) -> tuple[TokenTree | None, Launched]:
        """`_choose` for a few chains in a round that nothing is learned from."""
        drafted = trees.num_valid.tolist()
        kept = [1 + count for count in self._lengths(trees, drafted, this, useful)]
        this = this._replace(num_drafting=len(drafted) - drafted.count(1), levels_grown=max(drafted) - 1)
        width = max(kept)
        if width == 1:
            return None, this
        if kept != drafted:
            trees = TokenTree(*(field[:, :width] for field in trees[:-1]), torch.tensor(kept))
        return trees, _with_rows(this, kept)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Learn what the round accepted, and what it took."""
        this = self._launched.popleft()
        if this.trees is not None and this.learns:
            self._learn(this.trees, this, result, flight.live[: this.num_decodes])
        if this.num_decodes:
            self._observe(this, flight, result)

    def _learn(self, trees: _Trees, this: Launched, result: RoundResult, live: list[bool]) -> None:
        on_path = np.zeros(trees.real.shape, dtype=bool)
        np.put_along_axis(on_path, result.path_nodes, True, axis=1)
        tried = trees.real & np.take_along_axis(on_path, np.maximum(trees.parents, 0), axis=1)
        parts = (trees.log_probs, trees.depths, *this.kinds_and_slots(), tried, tried & on_path)
        self.policy.learn(Round(*parts) if all(live) else Round(*(part[np.array(live)] for part in parts)))

    def _observe(self, this: Launched, flight: RoundInFlight, result: RoundResult) -> None:
        costs, times = self.policy.costs, flight.times
        num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks)
        with_prompts = num_chunk_tokens > 0
        costs.observe_prompts(num_chunk_tokens, sum(map(len, result.token_ids)) + sum(map(len, result.chunk_token_ids)))
        if this.num_drafting:
            costs.observe_draft(times.draft_s, this.num_drafting, this.levels_grown, this.num_context_tokens)
        costs.observe_verify(
            times.forward_s,
            this.num_decodes,
            this.num_extra,
            this.context,
            num_padding=this.num_padding,
            num_chunk_tokens=num_chunk_tokens,
        )
        costs.observe_host(times.host_s, bool(this.num_drafting), with_prompts)
        costs.observe_publish(times.publish_s, self._asked, with_prompts)

    def plan(self, running: list[Sequence], proposals: list[Sequence]) -> DraftPlan:
        """As the policy says."""
        num_reqs, context = max(len(running), len(proposals)), mean_context(proposals or running)
        plan = self.policy.plan(num_reqs, len(proposals), context)
        self._asked = plan.levels > 0
        return plan

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        """The policy's tables, where this buffer is behind."""
        self._num_context_tokens = num_context_tokens
        if plan.min_reach is None:
            return 0
        tracker, buffer = self.policy.tracker, outcome.min_reach.data_ptr()
        if self._rule[0] is not plan or self._rule[1] != tracker.version:
            self._rule, self._rule_number = (plan, tracker.version), self._rule_number + 1
        # Rounds alternate between two buffers: each is written when it is behind, not every time.
        if self._written.get(buffer) == self._rule_number:
            return self._rule_number
        self._written[buffer] = self._rule_number
        outcome.min_reach.numpy()[:] = plan.min_reach
        outcome.node_price.numpy()[:] = plan.node_price
        outcome.acceptance_table.numpy()[:] = tracker.table
        outcome.depth_factors.numpy()[:] = tracker.depth_factors
        outcome.request_factors.numpy()[:] = tracker.request_factors
        return self._rule_number

    def stats(self) -> PolicyStats:
        """Decisions so far."""
        return self.policy.stats()


def _useful_depth(seq: Sequence) -> int:
    """Levels of a tree that can be emitted before the request has all of its tokens; the last one is the bonus."""
    return max(seq.request.params.max_tokens - (seq.min_len - seq.num_prompt_tokens) - 1, 0)


def _with_rows(this: Launched, lens: list[int]) -> Launched:
    """The round with the rows that verifying trees of so many nodes takes, roots included."""
    num_rows, num_padded = sum(lens), len(lens) * max(lens)
    if not worth_packing(num_rows, num_padded):
        return this._replace(num_extra=num_padded - len(lens))
    return this._replace(num_extra=num_rows - len(lens), num_padding=num_padded_apart(lens) - num_rows)


def _on_host(trees: TokenTree, max_depth: int) -> _Trees:
    parents, scores = trees.parents.numpy(), trees.scores.numpy()
    # Deeper than any path a round can emit: a drafter may send it, and it counts as the deepest there is.
    depths = np.minimum(trees.depths.numpy(), max_depth)
    index = np.arange(parents.shape[1])
    real = (index < trees.num_valid.numpy()[:, None]) & (index > 0)
    up = np.maximum(parents, 0)
    with np.errstate(invalid="ignore"):
        given = scores - (scores[0, up] if len(up) == 1 else np.take_along_axis(scores, up, axis=1))
    # A drafter's floats are believed no more than its tokens: what is no number, or padding, counts as hopeless.
    return _Trees(parents, depths, np.fmin(np.fmax(np.where(real, given, _HOPELESS), _HOPELESS), 0.0), real)


def _keep(trees: TokenTree, host: _Trees, kept: np.ndarray) -> tuple[TokenTree, _Trees]:
    """The trees with only the kept nodes, renumbered in their old order and no wider than the widest."""
    if (kept == host.real).all():
        return trees, host
    num_valid = 1 + kept.sum(axis=1)
    width = int(num_valid.max())
    if (kept[:, 1:] <= kept[:, :-1])[:, 1:].all():  # only ends of the trees go
        whole = TokenTree(*(field[:, :width] if field.dim() == 2 else _tensor(num_valid) for field in trees))
        return whole, _Trees(*(values[:, :width] for values in host[:-1]), kept[:, :width])
    with_root = kept.copy()
    with_root[:, 0] = True
    order = np.argsort(~with_root, axis=1, kind="stable")[:, :width]
    number = np.cumsum(with_root, axis=1) - 1
    real = np.arange(width) < num_valid[:, None]

    def column(values: np.ndarray, fill: float) -> np.ndarray:
        return np.where(real, np.take_along_axis(values, order, axis=1), fill)

    parents = np.take_along_axis(number, np.maximum(column(host.parents, 0), 0), axis=1)
    parents = np.where(real, parents, 0)
    parents[:, 0] = -1
    depths = column(host.depths, 0)
    pruned = TokenTree(
        _tensor(column(trees.token_ids.numpy(), 0)),
        _tensor(parents),
        _tensor(depths),
        _tensor(column(trees.scores.numpy(), 0.0)),
        _tensor(num_valid),
    )
    drafted = real.copy()
    drafted[:, 0] = False
    return pruned, _Trees(parents, depths, column(host.log_probs, _HOPELESS), drafted)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def learns_from(number: int, num_reqs: int) -> bool:
    """Whether the round of this number, with so many decodes, is learned from."""
    every = _LEARN_EVERY if num_reqs < _MANY else 2 * _LEARN_EVERY
    return number < _LEARN_ALWAYS or number % every == 0


def launched_with(decodes: list[Sequence]) -> Launched:
    """A round of these sequences of which nothing else is known."""
    sampled = [seq.request.params.temperature > 0 for seq in decodes]
    return Launched(None, False, sampled, [seq.slot for seq in decodes], len(decodes), mean_context(decodes))


def mean_context(seqs: list[Sequence]) -> float:
    """Tokens per sequence, as far as the host knows."""
    return sum(len(seq.token_ids) for seq in seqs) / len(seqs) if seqs else 0.0
