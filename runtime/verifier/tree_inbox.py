"""Trees that arrived, where captured rounds find them."""

import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree, TreeReply
from wingbeat.runtime.protocol.transfer import copy_all
from wingbeat.runtime.verifier.slots import DecodeRows, SlotState
from wingbeat.runtime.verifier.tree_check import TreeCheck


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

    def take(self, reply: TreeReply) -> None:
        """Keep what a drafter sent: one launch where it lies on the same GPU."""
        num_slots = len(reply.epochs)
        mine = {"epochs": self._epochs, "committed_lens": self._committed_lens, **self._trees._asdict()}
        copy_all([(into[:num_slots], getattr(reply, name)) for name, into in mine.items()])

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
