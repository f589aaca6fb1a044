"""Operations of a verifier's round besides the forward pass: torch reference and CPU path.

Trees have the format of `kernels.tree.reference`. Sequence state is stored by slot; `slots` holds the slot of each row.
The last slot is a spare one: padding rows of a batch use this slot, whose length never changes. CUDA tensors use the
kernels of `kernels.gpu.round`, one launch per function.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wingbeat.kernels import choice
from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.kernels.tree.forced import Draws, forced_walk
from wingbeat.kernels.tree.reference import walk_tree
from wingbeat.kernels.tree.results import GrownTree


class SlotColumns(NamedTuple):
    """Sequence state by slot, [num_slots] or [num_slots, max_blocks_per_seq]; the last slot is the spare one."""

    committed_lens: Tensor
    last_token_ids: Tensor
    epochs: Tensor
    block_tables: Tensor


class DraftedFor(NamedTuple):
    """State of each slot's sequence when the slot's tree was grown, int64 [num_slots]."""

    epochs: Tensor
    committed_lens: Tensor


class TreeRules(NamedTuple):
    """Constraints on every tree."""

    last_token: int
    """Highest token id of the vocabulary."""
    chains: bool
    """Whether each node's parent must be the node before it. If so, accepted keys and values are never moved."""


def well_formed(tree: GrownTree, rules: TreeRules) -> tuple[Tensor, Tensor]:
    """Checks that parents precede their children, depths follow from parents, and tokens exist.

    Depths must be checked, because a wrong depth would shift positions and so change the output.

    Returns:
        bool [num_reqs]: whether a tree is well formed; and bool [num_reqs, num_nodes]: True for padding nodes, whose
        index is num_valid or higher.
    """
    num_nodes = tree.token_ids.shape[1]
    index = torch.arange(num_nodes, device=tree.token_ids.device)
    drafted, highest = (index > 0).long(), index - 1
    parents = torch.clamp(tree.parents, highest if rules.chains else drafted - 1, highest)
    depths = tree.depths.gather(1, parents.clamp_min(0)).add_(1).mul_(drafted)
    bad = parents != tree.parents
    bad |= depths != tree.depths
    bad |= tree.token_ids.clamp(0, rules.last_token) != tree.token_ids
    outside = index >= tree.num_valid[:, None]
    bad.masked_fill_(outside, False)
    none_or_too_many = tree.num_valid.clamp(1, num_nodes) != tree.num_valid
    return bad.any(1).logical_or_(none_or_too_many).logical_not_(), outside


def check_trees(
    trees: GrownTree, grown: DraftedFor, slots: Tensor, wanted: Tensor, state: SlotColumns, rules: TreeRules
) -> GrownTree:
    """Returns one tree per row: the tree in the row's slot if it is usable, else a bare root.

    A tree is usable if it was requested, is well formed, and was grown for the sequence's present end.

    Args:
        trees: drafted trees, by slot.
        slots: int64 [num_reqs].
        wanted: bool [num_reqs]: a tree was requested.
    """
    if kernels := choice.compiled("check_trees", slots):
        return kernels.check_trees(trees, grown, slots, wanted, state, rules)
    own = GrownTree(*(field.index_select(0, slots) for field in trees))
    return believed(own, DraftedFor(*(ends[slots] for ends in grown)), slots, wanted, state, rules)[0]


def believed(
    tree: GrownTree, grown: DraftedFor, slots: Tensor, wanted: Tensor, state: SlotColumns, rules: TreeRules
) -> tuple[GrownTree, Tensor]:
    """`check_trees` for trees by row, in place: clears unusable nodes.

    Also returns bool [num_reqs]: usable trees.
    """
    usable, outside = well_formed(tree, rules)
    usable &= wanted
    usable &= state.epochs[slots] == grown.epochs
    usable &= state.committed_lens[slots] == grown.committed_lens
    usable &= tree.token_ids[:, 0] == state.last_token_ids[slots]
    # A stale row may hold any number, so the values of unusable nodes must not be used as indices.
    unusable = usable.logical_not()
    outside |= unusable[:, None]
    for field in (tree.token_ids, tree.parents, tree.depths):
        field.masked_fill_(outside, 0)
    tree.num_valid.masked_fill_(unusable, 1)
    return tree, usable


class PlacedNodes(NamedTuple):
    """Positions and storage of a round's nodes; [num_reqs] or [num_reqs, num_nodes]."""

    roots: Tensor
    """int64: position of each root."""
    token_ids: Tensor
    """int64: the nodes' tokens, in the memory of `tree.token_ids` if there is a tree."""
    positions: Tensor
    slot_mapping: Tensor
    tables: Tensor | None
    """int64 [num_reqs, max_blocks_per_seq]; None from the reference, whose callers gather the columns that they
    need."""


def place_nodes(
    slots: Tensor, state: SlotColumns, tree: GrownTree | None, last_position: int, block_size: int
) -> PlacedNodes:
    """Computes positions and slots of trees' nodes, and writes the roots' tokens into the trees.

    Args:
        tree: None if all trees are bare roots.
        last_position: highest position that the model supports.
    """
    if kernels := choice.compiled("place_nodes", slots):
        return kernels.place_nodes(slots, state, tree, last_position, block_size)
    roots, root_ids = state.committed_lens[slots] - 1, state.last_token_ids[slots]
    if tree is None:
        positions = roots[:, None]
        mapping = slot_mapping(state.block_tables[slots], positions, block_size)
        return PlacedNodes(roots, root_ids[:, None], positions, mapping, None)
    tree.token_ids[:, 0] = root_ids
    steps = torch.arange(tree.token_ids.shape[1], device=slots.device)
    real = steps < tree.num_valid[:, None]
    # Positions are clamped, because the table of rotary angles ends at the last position. Nodes past it are never
    # accepted.
    positions = (roots[:, None] + torch.where(real, tree.depths, 0)).clamp_max(last_position)
    mapping = slot_mapping(state.block_tables[slots], roots[:, None] + steps, block_size, real)
    return PlacedNodes(roots, tree.token_ids, positions, mapping, None)


class WalkedTrees(NamedTuple):
    """Trees of a round with the target's choices; one path of each tree is accepted."""

    slots: Tensor
    """int64 [num_reqs]; `roots` likewise."""
    roots: Tensor
    tree: GrownTree | None
    """None if all trees are bare roots."""
    chosen: Tensor
    """int64 [num_reqs * num_nodes]: the target's choice after each node."""
    evidence: Tensor | None
    """int64 [num_reqs, n]: copied into `SettledPaths.host_summary`; or None."""
    draws: Draws | None = None
    """Source of drawn path lengths; None if the target's choices determine the lengths."""


class PathShape(NamedTuple):
    """Limits of paths."""

    max_path: int
    """Maximum number of tokens of a path."""
    last_column: int
    """Last column of a sequence's token history."""
    block_size: int
    moves: bool
    """Whether accepted nodes may be stored apart from each other, so that their KV must be moved."""


class SettledPaths(NamedTuple):
    """Accepted paths, and values derived from them; `longest` = min(max_path, num_nodes)."""

    nodes: Tensor
    """int64 [num_reqs, longest]: see `WalkResult`."""
    num_tokens: Tensor
    """int64 [num_reqs]: tokens of each path."""
    token_ids: Tensor
    """int64 [num_reqs, max_path]: tokens of each path, then 0."""
    rows: Tensor
    """int64 [num_reqs * longest]: index of each path node in the flattened batch."""
    columns: Tensor
    """int64 [num_reqs, max_path]: columns of the tokens in the history."""
    host_summary: Tensor
    """int64 [num_reqs, 2 + max_path + longest + n], for the host: number of tokens, valid nodes, tokens, nodes and
    evidence."""
    sources: Tensor
    """int64 [num_reqs, longest]: slots from which accepted keys and values move; 0 for keys and values that stay."""
    targets: Tensor
    """int64 [num_reqs, longest]: slots to which accepted keys and values move; 0 for keys and values that stay."""


def settle_paths(walked: WalkedTrees, state: SlotColumns, shape: PathShape) -> SettledPaths:
    """Walks the trees along the target's choices, and advances the sequences' state in place."""
    if kernels := choice.compiled("settle_paths", walked.slots):
        return kernels.settle_paths(walked, state, shape)
    slots, tree, chosen = walked.slots, walked.tree, walked.chosen.view(len(walked.slots), -1)
    num_reqs, num_nodes = chosen.shape
    longest = min(shape.max_path, num_nodes)
    if tree is None:
        ones = torch.ones_like(slots)
        nodes, num_tokens, token_ids, num_valid = torch.zeros_like(chosen), ones, chosen, ones
    else:
        given = tree.token_ids, tree.parents, tree.num_valid, chosen
        drawn = walked.draws
        walk = walk_tree(*given, longest) if drawn is None else forced_walk(*given, drawn, longest)
        nodes, num_tokens, token_ids = walk
        num_valid = tree.num_valid
    # A walk is no longer than its tree; tokens are padded to the fixed width `max_path`.
    token_ids = pad(token_ids, (0, shape.max_path - longest))
    spare = len(state.committed_lens) - 1
    state.committed_lens[slots] += torch.where(slots == spare, 0, num_tokens)
    state.last_token_ids[slots] = token_ids.gather(1, (num_tokens - 1)[:, None])[:, 0]
    rows = nodes + torch.arange(num_reqs, device=slots.device)[:, None] * num_nodes
    ahead = torch.arange(1, shape.max_path + 1, device=slots.device)
    columns = (walked.roots[:, None] + ahead).clamp_max_(shape.last_column)
    parts = [num_tokens[:, None], num_valid[:, None], token_ids, nodes]
    told = torch.cat(parts if walked.evidence is None else [*parts, walked.evidence], dim=1)
    moves = path_moves(slots, walked.roots, nodes, num_tokens, state, shape) if shape.moves else (nodes, nodes)
    return SettledPaths(nodes, num_tokens, token_ids, rows.flatten(), columns, told, *moves)


def path_moves(
    slots: Tensor, roots: Tensor, nodes: Tensor, num_tokens: Tensor, state: SlotColumns, shape: PathShape
) -> tuple[Tensor, Tensor]:
    """Slots from which accepted nodes' keys and values move, and slots to which they move; 0 if they stay."""
    steps = torch.arange(nodes.shape[1], device=nodes.device)
    moved, start = (steps < num_tokens[:, None]) & (nodes != steps), roots[:, None]
    tables = state.block_tables[slots]
    source, target = (slot_mapping(tables, start + stored, shape.block_size, moved) for stored in (nodes, steps))
    return source, target
