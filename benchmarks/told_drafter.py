"""A drafter that is given the future text, and drafts it among wrong tokens."""

import random

import torch

from wingbeat.runtime.drafters.base import DraftBatch, Drafter
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree

_WRONG_EVERY = 3


class ToldDrafter(Drafter):
    """Drafts trees in which the right token is the last of two or three siblings.

    Every third tree is wrong from its root on.

    Args:
        sequences: prompts with their continuations; other histories get a bare root.
    """

    def __init__(self, sequences: list[list[int]], vocab_size: int) -> None:
        self.sequences, self.vocab_size = sequences, vocab_size
        self._chance = random.Random(5)
        self._num_trees = 0

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Stores the size of the trees."""
        self._num_nodes, self._num_levels = spec.num_nodes, spec.max_path - 1

    def commit(self, batch: DraftBatch) -> None:
        """Does nothing: the text is known."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Returns one tree per sequence, padded."""
        slots = batch.proposal_slots.tolist()
        histories = [batch.token_ids[slot, : batch.committed_lens[slot]].tolist() for slot in slots]
        shape = (len(slots), self._num_nodes)
        token_ids, parents, depths = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        num_valid = torch.ones(len(slots), dtype=torch.int64)
        for row, history in enumerate(histories):
            token_ids[row, 0], parents[row, 0] = history[-1], -1
            nodes = self._nodes(history)
            for index, (token_id, parent) in enumerate(nodes, start=1):
                token_ids[row, index], parents[row, index] = token_id, parent
                depths[row, index] = depths[row, parent] + 1
            num_valid[row] = 1 + len(nodes)
        return TokenTree(token_ids, parents, depths, -depths.float(), num_valid)

    def _nodes(self, history: list[int]) -> list[tuple[int, int]]:
        """(token, parent) of nodes 1, 2, ..."""
        length = len(history)
        known = next((sequence for sequence in self.sequences if sequence[:length] == history), history)
        upcoming = known[length : length + self._num_levels]
        self._num_trees += 1
        nodes: list[tuple[int, int]] = []
        parent = 0
        for depth, token_id in enumerate(upcoming):
            others = [(token_id + self._chance.randrange(1, self.vocab_size)) % self.vocab_size for _ in range(3)]
            wrong = depth == 0 and self._num_trees % _WRONG_EVERY == 0
            siblings = list(dict.fromkeys([*others[:2], others[2] if wrong else token_id]))
            if 1 + len(nodes) + len(siblings) > self._num_nodes:
                break
            nodes += [(sibling, parent) for sibling in siblings]
            parent = len(nodes)
        return nodes
