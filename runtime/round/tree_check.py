"""Which of the trees that arrived are believed.

A drafter is another process, and may be a user's: whatever it sends, a round verifies either a tree that was grown from
the sequence's present end, or a bare root.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree, TreeReply
from wingbeat.runtime.protocol.transfer import Copies
from wingbeat.runtime.round.slots import DecodeRows, SlotState


class CheckedTrees(NamedTuple):
    """One tree per decoding sequence."""

    trees: TokenTree
    """A bare root where what arrived does not count."""
    usable: Tensor
    """bool [num_decodes]: what arrived counts."""


class TreeCheck:
    """Looks at trees of one width on one device, without a wait.

    Args:
        num_nodes: columns of the trees, the root's included.
        chains: each node must follow the one before it: where chains are configured, accepted KV is never moved.
    """

    def __init__(self, num_nodes: int, vocab_size: int, device: torch.device, *, chains: bool) -> None:
        self._num_nodes, self._last_token = num_nodes, vocab_size - 1
        self._index = torch.arange(num_nodes, device=device)
        self._drafted = (self._index > 0).long()
        self._highest_parent = self._index - 1
        self._lowest_parent = self._highest_parent if chains else self._drafted - 1

    def __call__(
        self, tree: TokenTree, epochs: Tensor, committed_lens: Tensor, rows: DecodeRows, state: SlotState
    ) -> CheckedTrees:
        """Tell what was grown from the sequences' present ends from everything else.

        Args:
            tree: by decode, on the sequences' device; changed to what counts of it.
            epochs: int64 [num_slots] that the trees were grown for, on that device, by slot; `committed_lens` likewise.
        """
        usable, outside = self.well_formed(tree)
        usable &= rows.wanted
        usable &= state.is_at(epochs, committed_lens).index_select(0, rows.slots)
        usable &= tree.token_ids[:, 0] == state.last_token_ids.index_select(0, rows.slots)
        # What is not to be verified must not reach an index either: a stale row may hold anything.
        unusable = usable.logical_not()
        outside |= unusable[:, None]
        for field in (tree.token_ids, tree.parents, tree.depths):
            field.masked_fill_(outside, 0)
        tree.num_valid.masked_fill_(unusable, 1)
        return CheckedTrees(tree, usable)

    def well_formed(self, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """Whether parents precede their children, depths follow from them, tokens exist.

        A wrong depth would shift positions and so change the output: it is the one field that must never be believed.

        Returns:
            bool [num_reqs], and which nodes do not count by the tree's own word: bool [num_reqs, num_nodes].
        """
        # Few operations on whole tensors: each of them costs a launch, which is more than what it computes.
        parents = torch.clamp(tree.parents, self._lowest_parent, self._highest_parent)
        depths = tree.depths.gather(1, parents.clamp_min(0)).add_(1).mul_(self._drafted)
        bad = parents != tree.parents
        bad |= depths != tree.depths
        bad |= tree.token_ids.clamp(0, self._last_token) != tree.token_ids
        outside = self._index >= tree.num_valid[:, None]
        bad.masked_fill_(outside, False)
        none_or_too_many = tree.num_valid.clamp(1, self._num_nodes) != tree.num_valid
        return bad.any(1).logical_or_(none_or_too_many).logical_not_(), outside


class TreeInbox:
    """The latest reply by slot, at addresses that never change; nothing of it is believed before it is looked at.

    Args:
        num_nodes: columns of the trees, the root's included.
        chains: see `TreeCheck`.
    """

    def __init__(self, state: SlotState, num_nodes: int, *, chains: bool) -> None:
        self.state = state
        self._check = TreeCheck(num_nodes, state.vocab_size, state.device, chains=chains)
        with torch.inference_mode(mode=False):
            self._epochs, self._committed_lens, num_valid = (torch.zeros_like(state.epochs) for _ in range(3))
            ids, parents, depths = (num_valid.new_zeros(len(num_valid), num_nodes) for _ in range(3))
            self._trees = TokenTree(ids, parents, depths, ids.to(torch.float32), num_valid)
        self._copies: dict[int, tuple[TreeReply, Copies]] = {}
        """By the id of the reply they are of; a channel has two replies, which take turns."""

    def take(self, reply: TreeReply) -> None:
        """Keep what a drafter sent: one launch where it lies on the same GPU."""
        if id(reply) not in self._copies:
            if len(self._copies) == 2:  # of another channel, or of one that makes its replies anew
                self._copies.clear()
            num_slots = len(reply.epochs)
            mine = {"epochs": self._epochs, "committed_lens": self._committed_lens, **self._trees._asdict()}
            pairs = [(into[:num_slots], getattr(reply, name)) for name, into in mine.items()]
            self._copies[id(reply)] = reply, Copies(pairs)
        self._copies[id(reply)][1].run()

    def collect(self, reply: TreeReply, rows: DecodeRows) -> "TreeInbox":
        """Trees of a round's decodes, unchecked: `take`, and this inbox."""
        self.take(reply)
        return self

    def checked(self, rows: DecodeRows) -> TokenTree:
        """One tree per row, a bare root where what arrived does not count; of nobody's slot always."""
        trees = TokenTree(*(field.index_select(0, rows.slots) for field in self._trees))
        return self._check(trees, self._epochs, self._committed_lens, rows, self.state).trees

    def put(self, slots: Tensor, trees: TokenTree) -> DecodeRows:
        """Trees that are checked, in place of those that arrived; the rows by which they are found."""
        for into, field in zip(self._trees, trees, strict=True):
            into[slots] = field
        self._trees.token_ids[slots, 0] = self.state.last_token_ids[slots]
        self._epochs[slots] = self.state.epochs[slots]
        self._committed_lens[slots] = self.state.committed_lens[slots]
        return DecodeRows(slots, torch.ones_like(slots, dtype=torch.bool))
