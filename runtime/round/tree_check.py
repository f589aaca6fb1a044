"""Checks the trees that arrive from a drafter.

A drafter is another process and may be a user's own code. Whatever the drafter sends, a round verifies either a
well-formed tree that grows from the sequence's current end, or a bare root.
"""

import torch
from torch import Tensor

from wingbeat.kernels.round.reference import DraftedFor, TreeRules, check_trees
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.runtime.protocol.messages import TokenTree, TreeReply
from wingbeat.runtime.protocol.transfer import Copies
from wingbeat.runtime.round.slots import DecodeRows, SlotState


class TreeInbox:
    """Holds the drafter's latest reply, unchecked, by slot and at fixed addresses.

    Args:
        num_nodes: number of columns of the trees, including the root.
        chains: see `TreeRules`.
    """

    def __init__(self, state: SlotState, num_nodes: int, *, chains: bool) -> None:
        self.state = state
        self._rules = TreeRules(state.vocab_size - 1, chains)
        with torch.inference_mode(mode=False):
            self._epochs, self._committed_lens, num_valid = (torch.zeros_like(state.epochs) for _ in range(3))
            ids, parents, depths = (num_valid.new_zeros(len(num_valid), num_nodes) for _ in range(3))
            self._trees = TokenTree(ids, parents, depths, ids.to(torch.float32), num_valid)
        self._copies: dict[int, tuple[TreeReply, Copies]] = {}
        """Each reply and its copies into the inbox, by the reply's `id`; a channel alternates between two replies."""

    def copy_reply(self, reply: TreeReply) -> None:
        """Copies a drafter's reply into the inbox, with one kernel launch if the reply is on the same GPU."""
        if id(reply) not in self._copies:
            # Two other replies are stored, which will not arrive again: the channel is new, or creates a new reply for
            # each round.
            if len(self._copies) == 2:
                self._copies.clear()
            num_slots = len(reply.epochs)
            mine = {"epochs": self._epochs, "committed_lens": self._committed_lens, **self._trees._asdict()}
            pairs = [(into[:num_slots], getattr(reply, name)) for name, into in mine.items()]
            self._copies[id(reply)] = reply, Copies(pairs)
        self._copies[id(reply)][1].run()

    def collect(self, reply: TreeReply, rows: DecodeRows) -> "TreeInbox":
        """Copies a drafter's reply and returns this inbox; the trees are unchecked."""
        self.copy_reply(reply)
        return self

    def checked(self, rows: DecodeRows) -> TokenTree:
        """Returns one checked tree per row.

        The result is a bare root if the drafter's tree is malformed or outdated, and for a padding row.
        """
        grown = DraftedFor(self._epochs, self._committed_lens)
        told = GrownTree(*self._trees)
        return TokenTree(*check_trees(told, grown, rows.slots, rows.wanted, self.state.columns, self._rules))

    def put(self, slots: Tensor, trees: TokenTree) -> DecodeRows:
        """Replaces the trees that arrived for `slots` by trees of the sequences' present ends, which may be narrower.

        Returns rows that refer to these trees.
        """
        for into, field in zip(self._trees, trees, strict=True):
            (into[:, : field.shape[1]] if field.dim() == 2 else into)[slots] = field
        self._trees.token_ids[slots, 0] = self.state.last_token_ids[slots]
        self._epochs[slots] = self.state.epochs[slots]
        self._committed_lens[slots] = self.state.committed_lens[slots]
        return DecodeRows(slots, torch.ones_like(slots, dtype=torch.bool))
