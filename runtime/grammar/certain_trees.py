"""Adds to draft trees the tokens that a grammar forces. The tokens form chains in addition to the drafter's nodes, or
without a drafter trees of their own.
"""

import torch
from torch.nn.functional import pad

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


def with_certain(plan: SchedulerOutput, trees: TokenTree | None, shape: SpeculationConfig) -> TokenTree | None:
    """Adds chains of forced tokens to the trees of a round on the host. The returned trees are padded to the largest
    tree.

    Args:
        trees: one tree per decode; None if all trees are bare roots.
        shape: limits of trees.
    """
    chains = _chains(plan, shape.max_path - 1)
    if not chains:
        return trees
    if trees is None:
        trees = _bare_roots(len(plan.decodes))
    missing = shape.num_nodes - trees.token_ids.shape[1]
    trees = TokenTree(*(pad(field, (0, missing)) if field.dim() == 2 else field for field in trees))
    trees = _add_chains(plan, trees, chains, shape)
    width = int(trees.num_valid.max())
    return TokenTree(*(field[:, :width] if field.dim() == 2 else field for field in trees))


def add_certain(
    plan: SchedulerOutput, trees: TokenTree | None, shape: SpeculationConfig, device: torch.device
) -> TokenTree | None:
    """Adds chains of forced tokens to trees of fixed width, on any device; returns None if `trees` is None."""
    if trees is None:
        return None
    chains = _chains(plan, shape.max_path - 1)
    return _add_chains(plan, trees, chains, shape) if chains else trees


def _chains(plan: SchedulerOutput, max_depth: int) -> dict[int, list[int]]:
    """Forced tokens by index of the decode. Contains the decodes that have at least one forced token and whose trees
    may have nodes besides the root.
    """
    rows = zip(plan.decodes, plan.with_nodes(), strict=True)
    chains = {row: seq.certain(max_depth) for row, (seq, has_room) in enumerate(rows) if has_room}
    return {row: chain for row, chain in chains.items() if chain}


def _bare_roots(num_reqs: int) -> TokenTree:
    zeros = torch.zeros(num_reqs, 1, dtype=torch.int64)
    return TokenTree(zeros, zeros - 1, zeros, zeros.to(torch.float32), torch.ones(num_reqs, dtype=torch.int64))


def _add_chains(
    plan: SchedulerOutput, trees: TokenTree, chains: dict[int, list[int]], shape: SpeculationConfig
) -> TokenTree:
    trees, chains_only = TokenTree(*(field.clone() for field in trees)), shape.draft_top_k == 1
    for row, chain in chains.items():
        if not (chains_only and _begins_otherwise(trees, row, chain, plan.decodes[row])):
            _add_chain(trees, row, chain, chains_only=chains_only)
    return trees


def _begins_otherwise(trees: TokenTree, row: int, chain: list[int], seq: Sequence) -> bool:
    """Whether the drafter's tree begins with another allowed token.

    Such a tree is kept without a chain, because the drafter has learned how the model splits a text into tokens.
    """
    if int(trees.num_valid[row]) == 1:
        return False
    first = int(trees.token_ids[row, 1])
    return first != chain[0] and seq.masker.allows(first)


def _add_chain(trees: TokenTree, row: int, chain: list[int], *, chains_only: bool) -> None:
    """Adds a path to a tree in place. If the path does not fit into the tree, the tree's last nodes are removed.

    Args:
        chains_only: whether trees must not branch.
    """
    num_nodes, num_valid = trees.token_ids.shape[1], int(trees.num_valid[row])
    chain = chain[: num_nodes - 1]
    node, rest = _follow(trees, row, num_valid, chain)
    if not rest:
        return
    if num_valid + len(rest) > num_nodes:
        # Parents come before their children, so the remaining nodes still form a tree.
        num_valid = num_nodes - len(chain)
        node, rest = _follow(trees, row, num_valid, chain)
    if chains_only and node != num_valid - 1:
        node, rest, num_valid = 0, chain, 1
    depth, end = int(trees.depths[row, node]), num_valid + len(rest)
    steps = torch.arange(len(rest), device=trees.parents.device)
    trees.token_ids[row, num_valid:end] = torch.tensor(rest, device=steps.device)
    trees.parents[row, num_valid:end] = num_valid + steps - 1
    trees.parents[row, num_valid] = node
    trees.depths[row, num_valid:end] = depth + 1 + steps
    trees.scores[row, num_valid:end] = 0.0
    trees.num_valid[row] = end


def _follow(trees: TokenTree, row: int, num_valid: int, chain: list[int]) -> tuple[int, list[int]]:
    """Follows a chain of tokens among a tree's first `num_valid` nodes. Returns the deepest node reached, and the rest
    of the chain.
    """
    token_ids, parents = (field[row, :num_valid].tolist() for field in (trees.token_ids, trees.parents))
    node = 0
    for place, token_id in enumerate(chain):
        children = (child for child in range(node + 1, num_valid) if parents[child] == node)
        child = next((child for child in children if token_ids[child] == token_id), None)
        if child is None:
            return node, chain[place:]
        node = child
    return node, []
