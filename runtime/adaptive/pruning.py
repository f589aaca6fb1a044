"""Prunes trees on the device to the nodes most likely to be accepted; keeps as many nodes as a captured graph verifies.

The host chooses how many nodes of each tree are verified; this module chooses the nodes, with the ranking of
`runtime.adaptive`. Tensor shapes here depend on no tensor's values, so that pruning can be captured. A captured
shape gives every tree the same number of rows, so nodes are ranked within each tree. Evidence for the host's
calibration is downloaded with the round's tokens.
"""

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.adaptive.acceptance import (
    DEPTH_BIT,
    KEPT_BIT,
    NO_CONFIDENCE,
    PARENT_BIT,
    REAL_BIT,
    Acceptance,
    bin_edges,
    draft_kind,
)
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Pruner
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class DevicePruner(Pruner):
    """Holds a table of calibrated acceptance probabilities on a device, and prunes trees according to this table.

    Args:
        num_slots: number of rows of the slot state, including the spare slot.
        max_depth: depth of the deepest node.
    """

    def __init__(self, num_slots: int, max_depth: int, device: torch.device) -> None:
        self.max_depth = max_depth
        self.kinds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Row of `Acceptance.table` for each slot."""
        self._of_text: dict[int, Sequence] = {}
        """Sequences whose entry in `kinds` marks their trees as built from earlier text, by slot."""
        self._edges = torch.from_numpy(bin_edges()).to(device, torch.float32)
        self._table = torch.from_numpy(Acceptance().table).to(device, torch.float32)

    def follow(self, plan: SchedulerOutput) -> None:
        """See `Pruner.follow`."""
        of_text = {seq.slot: seq for seq in plan.decodes if seq.draft.text_tree is not None}
        if plan.admitted or of_text.keys() != self._of_text.keys():
            changed = self._of_text | {seq.slot: seq for seq in plan.admitted} | of_text
            kinds = [draft_kind(seq) for seq in changed.values()]
            slots, kinds = upload([[*changed], kinds], self.kinds.device)
            self.kinds[slots] = kinds
            self._of_text = of_text

    def upload(self, table: np.ndarray) -> None:
        """Replaces the table by `Acceptance.table`.

        The copy is enqueued after the rounds in flight, and the host does not wait for the copy.
        """
        values = torch.from_numpy(table.astype(np.float32))
        self._table.copy_(values.pin_memory() if self._table.is_cuda else values, non_blocking=True)

    def prune(self, trees: TokenTree, slots: Tensor, num_nodes: int) -> tuple[TokenTree, Tensor]:
        """See `Pruner.prune`; `acceptance.unpack_evidence` decodes the evidence."""
        index = torch.arange(trees.token_ids.shape[1], device=slots.device)
        valid = index < trees.num_valid[:, None]
        # A round accepts at most `max_depth` drafted tokens, so deeper nodes are dropped. The table has no probability
        # for such depths.
        real = valid & (index > 0) & (trees.depths <= self.max_depth)
        up = trees.parents.clamp(min=0)
        log_probs = _conditional_log_probs(trees.scores, up, real)
        table = self._table[self.kinds[slots]]
        given_parent = table.gather(1, torch.bucketize(log_probs, self._edges))
        path = self._path_probabilities(torch.where(real, given_parent, (index == 0).to(table.dtype)), up)
        kept = real & (_ranks(path) < num_nodes)
        pruned = keep_nodes(trees, kept, num_nodes)
        return pruned, _pack(up, trees.depths.clamp(max=self.max_depth), log_probs, real, kept)

    @staticmethod
    def verified_nodes(evidence: Tensor, num_nodes: int) -> Tensor:
        """See `Pruner.verified_nodes`."""
        index = torch.arange(evidence.shape[1], device=evidence.device)
        stays = ((evidence >> KEPT_BIT) & 1).bool() | (index == 0)
        last = evidence.shape[1] - 1
        return torch.where(stays, index, last).sort(dim=1).values[:, :num_nodes]

    def _path_probabilities(self, one_step: Tensor, up: Tensor) -> Tensor:
        """Returns the probability that a node and all its ancestors are accepted; 1 for the root.

        See `acceptance.path_probabilities`.
        """
        path = one_step
        for _ in range(min(self.max_depth, up.shape[1] - 1) - 1):
            path = one_step * path.gather(1, up)
        return path


def keep_nodes(trees: TokenTree, kept: Tensor, num_nodes: int) -> TokenTree:
    """Returns the trees with only the kept nodes, in unchanged order and renumbered.

    Args:
        kept: bool [num_reqs, num_drafted]: nodes to keep; the parent of a kept node must be kept. Roots are kept even
            if not marked.
        num_nodes: number of columns of the result.
    """
    index = torch.arange(kept.shape[1], device=kept.device)
    stays = kept | (index == 0)
    number = stays.cumsum(dim=1) - 1
    into = torch.where(stays, number, num_nodes)
    source = number.new_zeros(len(kept), num_nodes + 1)
    source = source.scatter_(1, into, index.expand_as(into))[:, :num_nodes]
    num_valid = stays.sum(dim=1)
    shown = torch.arange(num_nodes, device=kept.device) < num_valid[:, None]
    parents = number.gather(1, trees.parents.clamp(min=0)).gather(1, source)
    parents[:, 0] = -1
    return TokenTree(
        torch.where(shown, trees.token_ids.gather(1, source), 0),
        torch.where(shown, parents, 0),
        torch.where(shown, trees.depths.gather(1, source), 0),
        trees.scores.gather(1, source),
        num_valid,
    )


def _conditional_log_probs(scores: Tensor, up: Tensor, real: Tensor) -> Tensor:
    # The drafter's scores are not trusted, so a NaN score counts as the least probability.
    scores = torch.nan_to_num(scores, nan=NO_CONFIDENCE, posinf=0.0, neginf=NO_CONFIDENCE)
    given = scores - scores.gather(1, up)
    return torch.where(real, given, NO_CONFIDENCE).clamp(NO_CONFIDENCE, 0.0)


def _ranks(values: Tensor) -> Tensor:
    """Returns each value's rank in its row, int64 [num_reqs, num_nodes].

    The largest value has rank 0; equal values are ranked by index.
    """
    index = torch.arange(values.shape[1], device=values.device)
    theirs, own = values[:, None, :], values[:, :, None]
    before = (theirs > own) | ((theirs == own) & (index < index[:, None]))
    return before.sum(dim=2)


def _pack(parents: Tensor, depths: Tensor, log_probs: Tensor, real: Tensor, kept: Tensor) -> Tensor:
    bits = log_probs.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    flags = (real.to(torch.int64) << REAL_BIT) | (kept.to(torch.int64) << KEPT_BIT)
    return bits | (parents << PARENT_BIT) | (depths << DEPTH_BIT) | flags
