"""Pruning on the device: of each tree the nodes most likely to be accepted, as many as a captured graph verifies.

The host forecasts how many nodes pay and says so with a width; which ones is decided here, from calibrated tables that
the host uploads, at shapes that no value changes. What the host learns from comes back with the round's tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.speculation.acceptance import AcceptanceTracker, bin_edges, conditional_on_device
from wingbeat.runtime.verifier.slots import SlotState

_NO_CONFIDENCE = -50.0
# One int64 a node: float32 log-probability in the low word, then parent, depth and two flags.
_PARENT, _DEPTH, _REAL, _KEPT = 32, 47, 61, 62
_PARENT_MASK, _DEPTH_MASK = (1 << (_DEPTH - _PARENT)) - 1, (1 << (_REAL - _DEPTH)) - 1


class PrunedTrees(NamedTuple):
    """What a round verifies, and what is learned from it."""

    trees: TokenTree
    """As wide as asked for."""
    evidence: Tensor
    """int64 [num_reqs, num_nodes]: the nodes before pruning, packed; `unpack_evidence` reads them."""


class Evidence(NamedTuple):
    """Trees of one round on the host, before pruning: [num_reqs, num_nodes]."""

    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    """Conditional on the parent."""
    real: np.ndarray
    """Drafted nodes that count; roots excluded."""
    kept: np.ndarray
    """Those that were verified; roots excluded."""


class DevicePruner:
    """Calibrated acceptance on a device, and the choice by it.

    Args:
        slots: for temperatures by slot; the spare one included.
        max_depth: of the deepest node.
    """

    def __init__(self, slots: SlotState, max_depth: int) -> None:
        self.max_depth = max_depth
        self.slots = slots
        self._edges = torch.from_numpy(bin_edges()).to(slots.device, torch.float32)
        prior = AcceptanceTracker(slots.spare + 1, max_depth)
        self._table, self._depth_factors, self._request_factors = (
            torch.from_numpy(values).to(slots.device, torch.float32)
            for values in (prior.table, prior.depth_factors, prior.request_factors)
        )

    def upload(self, tracker: AcceptanceTracker) -> None:
        """Take over what was learned; enqueued behind the rounds that were launched, not waited for."""
        parts = (tracker.table, tracker.depth_factors, tracker.request_factors)
        into = (self._table, self._depth_factors, self._request_factors[:-1])
        values = torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.float32))
        if self._table.is_cuda:
            values = values.pin_memory().to(self._table.device, non_blocking=True)
        for target, part in zip(into, values.split([target.numel() for target in into]), strict=True):
            target.copy_(part.view(target.shape))

    def prune(self, trees: TokenTree, slots: Tensor, num_nodes: int) -> PrunedTrees:
        """Keep the root and the best num_nodes - 1 drafted nodes of each tree, in their old order.

        Args:
            trees: [num_reqs, num_drafted]; a row that is not to be verified has one valid node.
            slots: int64 [num_reqs].
            num_nodes: width of the result.
        """
        num_reqs, num_drafted = trees.token_ids.shape
        index = torch.arange(num_drafted, device=slots.device)
        valid = index < trees.num_valid[:, None]
        # What lies below the longest path cannot be emitted, and its probability is not known.
        real = valid & (index > 0) & (trees.depths <= self.max_depth)
        up = trees.parents.clamp(min=0)
        log_probs = _conditional_log_probs(trees.scores, up, real)
        conditional = conditional_on_device(
            log_probs,
            self._edges,
            self._table[(self.slots.temperatures[slots] > 0).to(torch.int64)],
            self._depth_factors[trees.depths.clamp(max=self.max_depth)] * self._request_factors[slots][:, None],
        )
        path = self._path_probabilities(torch.where(real, conditional, (index == 0).to(conditional.dtype)), up)
        kept = real & (_ranks(path) < num_nodes)
        stays = kept | (index == 0)
        number = stays.cumsum(dim=1) - 1
        into = torch.where(stays, number, num_nodes)
        source = slots.new_zeros(num_reqs, num_nodes + 1)
        source = source.scatter_(1, into, index.expand_as(into))[:, :num_nodes]
        num_valid = stays.sum(dim=1)
        shown = torch.arange(num_nodes, device=slots.device) < num_valid[:, None]
        parents = number.gather(1, up).gather(1, source)
        parents[:, 0] = -1
        pruned = TokenTree(
            torch.where(shown, trees.token_ids.gather(1, source), 0),
            torch.where(shown, parents, 0),
            torch.where(shown, trees.depths.gather(1, source), 0),
            trees.scores.gather(1, source),
            num_valid,
        )
        return PrunedTrees(pruned, _pack(up, trees.depths, log_probs, real, kept))

    def _path_probabilities(self, one_step: Tensor, up: Tensor) -> Tensor:
        """P(node and all its ancestors are accepted); the root's is 1. See `acceptance.path_probabilities`."""
        path = one_step
        for _ in range(min(self.max_depth, up.shape[1] - 1) - 1):
            path = one_step * path.gather(1, up)
        return path


def unpack_evidence(words: np.ndarray) -> Evidence:
    """Read `PrunedTrees.evidence` on the host."""
    log_probs = (words & 0xFFFFFFFF).astype(np.uint32).view(np.float32).astype(np.float64)
    return Evidence(
        parents=(words >> _PARENT) & _PARENT_MASK,
        depths=(words >> _DEPTH) & _DEPTH_MASK,
        log_probs=log_probs,
        real=(words >> _REAL) & 1 == 1,
        kept=(words >> _KEPT) & 1 == 1,
    )


def _conditional_log_probs(scores: Tensor, up: Tensor, real: Tensor) -> Tensor:
    # A drafter's floats are believed no more than its tokens: what is no number counts as hopeless.
    scores = torch.nan_to_num(scores, nan=_NO_CONFIDENCE, posinf=0.0, neginf=_NO_CONFIDENCE)
    given = scores - scores.gather(1, up)
    return torch.where(real, given, _NO_CONFIDENCE).clamp(_NO_CONFIDENCE, 0.0)


def _ranks(values: Tensor) -> Tensor:
    """Place of each value in its row, best first, equal ones by index: int64 [num_reqs, num_nodes]."""
    index = torch.arange(values.shape[1], device=values.device)
    theirs, own = values[:, None, :], values[:, :, None]
    before = (theirs > own) | ((theirs == own) & (index < index[:, None]))
    return before.sum(dim=2)


def _pack(parents: Tensor, depths: Tensor, log_probs: Tensor, real: Tensor, kept: Tensor) -> Tensor:
    bits = log_probs.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    flags = (real.to(torch.int64) << _REAL) | (kept.to(torch.int64) << _KEPT)
    return bits | (parents << _PARENT) | (depths << _DEPTH) | flags
