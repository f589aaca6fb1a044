"""Drafters that know the reference, on purpose right, wrong or malformed, behind the real drafter interface."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from wingbeat.kernels.round.reference import TreeRules
from wingbeat.kernels.round.reference import well_formed as well_formed_trees
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.runtime.drafters.base import DraftBatch, Drafter
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree

Nodes = list[tuple[int, int]]
"""(token id, parent) of node 1, 2, ...; the root is node 0."""
Plan = Callable[[list[int], int, random.Random], Nodes]
"""(what the verifier will write next, at least one token; vocabulary size; source of chance) -> a tree."""


class ScriptedDrafter(Drafter):
    """Recognizes a reference sequence by its beginning and drafts by plan.

    Args:
        sequences: prompts with continuations; a history that begins none of them gets a bare root.
        corrupt: changes the finished tensors of the trees in place.
    """

    def __init__(
        self,
        sequences: list[list[int]],
        plan: Plan,
        vocab_size: int,
        corrupt: Callable[[TokenTree, random.Random], None] | None = None,
    ) -> None:
        self.sequences = sequences
        self.plan = plan
        self.vocab_size = vocab_size
        self.corrupt = corrupt
        self.num_nodes = 0
        self.num_trees = 0
        self.num_unknown = 0
        """Histories without a reference: only where a slot changed hands while its tree was on the way."""
        self._random = random.Random(11)

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Takes the size of the trees."""
        self.num_nodes, self.steps = spec.num_nodes, spec.max_path - 1

    def commit(self, batch: DraftBatch) -> None:
        """Learns nothing."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Trees by plan, padded."""
        histories = [
            batch.token_ids[slot, : batch.committed_lens[slot]].tolist() for slot in batch.proposal_slots.tolist()
        ]
        upcoming = [self._upcoming(history) for history in histories]
        plans = [self.plan(tokens, self.vocab_size, self._random) if tokens else [] for tokens in upcoming]
        self.num_trees += len(plans)
        tree = tree_tensors([history[-1] for history in histories], plans, self.num_nodes)
        if self.corrupt is not None:
            self.corrupt(tree, self._random)
        return tree

    def _upcoming(self, history: list[int]) -> list[int]:
        for sequence in self.sequences:
            if sequence[: len(history)] == history:
                return sequence[len(history) : len(history) + self.steps]
        self.num_unknown += 1
        return []


def tree_tensors(roots: list[int], plans: list[Nodes], num_nodes: int) -> TokenTree:
    """Trees with the given nodes; padding has token 0, parent 0 and depth 0."""
    shape = (len(plans), num_nodes)
    tree = TokenTree(*(torch.zeros(shape, dtype=torch.int64) for _ in range(3)), torch.zeros(shape), _counts(plans))
    for row, (root, nodes) in enumerate(zip(roots, plans, strict=True)):
        tree.token_ids[row, 0], tree.parents[row, 0] = root, -1
        for index, (token_id, parent) in enumerate(nodes[: num_nodes - 1], start=1):
            tree.token_ids[row, index], tree.parents[row, index] = token_id, parent
            tree.depths[row, index] = tree.depths[row, parent] + 1
            tree.scores[row, index] = -float(tree.depths[row, index])
    return tree


def _counts(plans: list[Nodes]) -> Tensor:
    return torch.tensor([1 + len(nodes) for nodes in plans])


def right_chain(upcoming: list[int], vocab_size: int, chance: random.Random) -> Nodes:
    """Exactly what comes next."""
    return [(token_id, index) for index, token_id in enumerate(upcoming)]


def right_tree(upcoming: list[int], vocab_size: int, chance: random.Random) -> Nodes:
    """Upcoming tokens, each as the last of three siblings, so that each accepted node has to be moved."""
    nodes: Nodes = []
    parent = 0
    for token_id in upcoming:
        decoys = chance.sample([t for t in range(vocab_size) if t != token_id], 2)
        nodes += [(decoys[0], parent), (decoys[1], parent), (token_id, parent)]
        parent = len(nodes)
    return nodes


def wrong_tree(upcoming: list[int], vocab_size: int, chance: random.Random) -> Nodes:
    """Every child of the root differs from the next token; what follows them would be right."""
    wrong = chance.sample([token_id for token_id in range(vocab_size) if token_id != upcoming[0]], 3)
    return [
        *((token_id, 0) for token_id in wrong),
        *((token_id, 3 + index) for index, token_id in enumerate(upcoming[1:])),
    ]


def random_tree(upcoming: list[int], vocab_size: int, chance: random.Random) -> Nodes:
    """Any shape; tokens from a few that often fit, siblings of equal tokens among them; now and then no node at all."""
    if chance.random() < 0.1:
        return []
    known = [*upcoming, chance.randrange(vocab_size)]
    return [(chance.choice(known), chance.randrange(index + 1)) for index in range(chance.randrange(1, 16))]


def well_formed(tree: TokenTree, vocab_size: int) -> bool:
    """Whether all of these are trees."""
    usable, _ = well_formed_trees(GrownTree(*tree), TreeRules(vocab_size - 1, chains=False))
    return bool(usable.all())


def malform(tree: TokenTree, chance: random.Random) -> None:
    """Break one rule of each tree that has a drafted node."""
    num_nodes = tree.token_ids.shape[1]
    breaks: list[Callable[[int, int], None]] = [
        lambda row, node: tree.parents[row].__setitem__(node, node),
        lambda row, node: tree.parents[row].__setitem__(node, num_nodes + 7),
        lambda row, node: tree.parents[row].__setitem__(node, -1),
        lambda row, node: tree.depths[row].__setitem__(node, 0),
        lambda row, node: tree.depths[row].__setitem__(node, tree.depths[row, node] + 3),
        lambda row, node: tree.depths[row].__setitem__(0, 1),
        lambda row, node: tree.token_ids[row].__setitem__(node, -1),
        lambda row, node: tree.token_ids[row].__setitem__(node, 1 << 40),
        lambda row, node: tree.token_ids[row].__setitem__(0, tree.token_ids[row, 0] + 1),
        lambda row, node: tree.num_valid.__setitem__(row, num_nodes + 1),
        lambda row, node: tree.num_valid.__setitem__(row, 0),
        lambda row, node: tree.num_valid.__setitem__(row, -5),
    ]
    for row, num_valid in enumerate(tree.num_valid.tolist()):
        if num_valid > 1:
            chance.choice(breaks)(row, chance.randrange(1, num_valid))
