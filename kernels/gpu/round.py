"""Operations of a round besides the forward pass, on a GPU: one launch per function of `kernels.round.reference`.

Each program handles one request. Trees are small, so the time depends mostly on the number of launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.kv import address_of
from wingbeat.kernels.gpu.sampling.noise import noise_bits, row_keys
from wingbeat.kernels.gpu.tree.walk import num_warps
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.round.reference import (
    DraftedFor,
    PathShape,
    PlacedNodes,
    SettledPaths,
    SlotColumns,
    TreeRules,
    WalkedTrees,
)
from wingbeat.kernels.tree.results import GrownTree

_TABLE_TILE = 1024


@triton.jit
def _check_kernel(
    token_ids,  # int64 [num_slots, num_nodes]; `parents` and `depths` likewise
    parents,
    depths,
    scores,  # float32
    num_valid,  # int64 [num_slots]; `grown_epochs` and `grown_lens` likewise
    grown_epochs,
    grown_lens,
    slots,  # int64 [num_reqs]
    wanted,  # uint8 [num_reqs]
    committed_lens,
    last_token_ids,
    epochs,
    out_token_ids,  # by request; the other output columns likewise
    out_parents,
    out_depths,
    out_scores,
    out_num_valid,
    num_nodes,
    last_token,
    CHAINS: tl.constexpr,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + req)
    nodes = tl.arange(0, NODES)
    there = nodes < num_nodes
    at = slot * num_nodes + nodes
    tokens = tl.load(token_ids + at, mask=there, other=0)
    up = tl.load(parents + at, mask=there, other=0)
    depth = tl.load(depths + at, mask=there, other=0)
    count = tl.load(num_valid + slot)
    drafted = (nodes > 0).to(tl.int64)
    highest = nodes.to(tl.int64) - 1
    if CHAINS:
        lowest = highest
    else:
        lowest = drafted - 1
    parent = tl.minimum(tl.maximum(up, lowest), highest)
    expected = tl.load(depths + slot * num_nodes + tl.maximum(parent, 0), mask=there, other=0)
    bad = (parent != up) | (depth != (expected + 1) * drafted) | (tokens < 0) | (tokens > last_token)
    outside = nodes >= count
    bad = bad & there & (outside == 0)
    root = tl.sum(tl.where(nodes == 0, tokens, 0), axis=0)
    usable = (tl.sum(bad.to(tl.int32), axis=0) == 0) & (count >= 1) & (count <= num_nodes)
    usable = usable & (tl.load(wanted + req) != 0)
    usable = usable & (tl.load(epochs + slot) == tl.load(grown_epochs + slot))
    usable = usable & (tl.load(committed_lens + slot) == tl.load(grown_lens + slot))
    usable = usable & (root == tl.load(last_token_ids + slot))
    # A stale row may hold any number, so the values of unusable nodes must not be used as indices.
    kept = (outside == 0) & usable
    to = req * num_nodes + nodes
    tl.store(out_token_ids + to, tl.where(kept, tokens, 0), mask=there)
    tl.store(out_parents + to, tl.where(kept, up, 0), mask=there)
    tl.store(out_depths + to, tl.where(kept, depth, 0), mask=there)
    tl.store(out_scores + to, tl.load(scores + at, mask=there, other=0.0), mask=there)
    tl.store(out_num_valid + req, tl.where(usable, count, 1))


def check_trees(
    trees: GrownTree, grown: DraftedFor, slots: Tensor, wanted: Tensor, state: SlotColumns, rules: TreeRules
) -> GrownTree:
    """Launches the kernel for `wingbeat.kernels.round.reference.check_trees`."""
    num_reqs, num_nodes = len(slots), trees.token_ids.shape[1]
    ids, parents, depths = (slots.new_empty(num_reqs, num_nodes) for _ in range(3))
    out = GrownTree(ids, parents, depths, trees.scores.new_empty(num_reqs, num_nodes), slots.new_empty(num_reqs))
    lanes = triton.next_power_of_2(num_nodes)
    if num_reqs:
        with torch.cuda.device_of(slots):
            _check_kernel[(num_reqs,)](
                *trees,
                *grown,
                slots.contiguous(),
                wanted.contiguous().view(torch.uint8),
                state.committed_lens,
                state.last_token_ids,
                state.epochs,
                *out,
                num_nodes,
                rules.last_token,
                CHAINS=rules.chains,
                NODES=lanes,
                num_warps=num_warps(lanes),
                **options(fused=False),
            )
    return out


@triton.jit(do_not_specialize=["last_position"])
def _place_kernel(
    slots,  # int64 [num_reqs]
    committed_lens,  # int64 [num_slots]; `last_token_ids` likewise
    last_token_ids,
    block_tables,  # int64 [num_slots, num_blocks]
    token_ids,  # int64 [num_reqs, num_nodes]: the kernel writes the roots' tokens (without trees, every column)
    depths,  # int64 [num_reqs, num_nodes]; None without trees; `num_valid` likewise
    num_valid,  # int64 [num_reqs]
    out_roots,
    out_positions,
    out_mapping,
    out_tables,
    num_nodes,
    num_blocks,
    last_position,
    BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + req)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < num_blocks
    blocks = tl.load(block_tables + slot * num_blocks + columns, mask=inside, other=0)
    tl.store(out_tables + req * num_blocks + columns, blocks, mask=inside)
    if tl.program_id(1) == 0:
        root = tl.load(committed_lens + slot) - 1
        nodes = tl.arange(0, NODES)
        there = nodes < num_nodes
        at = req * num_nodes + nodes
        tl.store(out_roots + req, root)
        tl.store(token_ids + req * num_nodes, tl.load(last_token_ids + slot))
        address = address_of(block_tables + slot * num_blocks, root + nodes, num_blocks, there, BLOCK_SIZE)
        position = root + 0 * nodes
        if depths is not None:
            real = nodes < tl.load(num_valid + req)
            # Positions are clamped, because the table of rotary angles ends at the last position. Nodes past it are
            # never accepted.
            position += tl.where(real, tl.load(depths + at, mask=there, other=0), 0)
            position = tl.minimum(position, last_position)
            address = tl.where(real, address, 0)
        tl.store(out_positions + at, position, mask=there)
        tl.store(out_mapping + at, address, mask=there)


def place_nodes(
    slots: Tensor, state: SlotColumns, tree: GrownTree | None, last_position: int, block_size: int
) -> PlacedNodes:
    """Launches the kernel for `wingbeat.kernels.round.reference.place_nodes`."""
    num_reqs, num_blocks = len(slots), state.block_tables.shape[1]
    num_nodes = 1 if tree is None else tree.token_ids.shape[1]
    token_ids = slots.new_empty(num_reqs, 1) if tree is None else tree.token_ids
    positions, mapping = (slots.new_empty(num_reqs, num_nodes) for _ in range(2))
    placed = PlacedNodes(
        slots.new_empty(num_reqs), token_ids, positions, mapping, slots.new_empty(num_reqs, num_blocks)
    )
    lanes = triton.next_power_of_2(num_nodes)
    if num_reqs:
        with torch.cuda.device_of(slots):
            _place_kernel[(num_reqs, triton.cdiv(num_blocks, _TABLE_TILE))](
                slots.contiguous(),
                state.committed_lens,
                state.last_token_ids,
                state.block_tables,
                token_ids,
                None if tree is None else tree.depths.contiguous(),
                None if tree is None else tree.num_valid.contiguous(),
                placed.roots,
                positions,
                mapping,
                placed.tables,
                num_nodes,
                num_blocks,
                last_position,
                BLOCK_SIZE=block_size,
                NODES=lanes,
                TILE=min(_TABLE_TILE, triton.next_power_of_2(num_blocks)),
                num_warps=4,
                **options(fused=False),
            )
    return placed


@triton.jit(do_not_specialize=["spare", "longest", "max_path", "num_told", "last_column"])
def _settle_kernel(
    slots,  # int64 [num_reqs]; `roots` likewise
    roots,
    token_ids,  # int64 [num_reqs, num_nodes]; None without trees; `parents` and `num_valid` likewise
    parents,
    num_valid,  # int64 [num_reqs]
    chosen,  # int64 [num_reqs, num_nodes]
    evidence,  # int64 [num_reqs, n], or None
    limits,  # int32 [max_depth], limits of drawn path lengths; None if lengths are not drawn; `epochs` likewise
    epochs,  # int64 [num_slots]
    max_depth,
    committed_lens,  # int64 [num_slots]; `last_token_ids` likewise
    last_token_ids,
    block_tables,  # int64 [num_slots, num_blocks]
    out_nodes,  # from here on the fields of SettledPaths
    out_num_tokens,
    out_token_ids,
    out_rows,
    out_columns,
    out_told,
    out_sources,
    out_targets,
    spare,
    num_nodes,
    longest,
    max_path,
    num_told,
    last_column,
    num_blocks,
    MOVES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    TOLD: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + req)
    root = tl.load(roots + req)
    at = req * num_nodes
    steps = tl.arange(0, PATH)
    path = tl.zeros([PATH], dtype=tl.int32)
    length = tl.full([], 1, dtype=tl.int64)
    count = tl.full([], 1, dtype=tl.int64)
    if token_ids is None:
        emitted = tl.where(steps == 0, tl.load(chosen + at), 0)
    else:
        nodes = tl.arange(0, NODES)
        there = nodes < num_nodes
        tokens = tl.load(token_ids + at + nodes, mask=there, other=0)
        up = tl.maximum(tl.load(parents + at + nodes, mask=there, other=0), 0)
        count = tl.load(num_valid + req)
        counts = there & (nodes > 0) & (nodes < count)
        emitted = tl.zeros([PATH], dtype=tl.int64)
        node = tl.full([], 0, dtype=tl.int32)
        walking = tl.full([], 1, dtype=tl.int32) > 0
        if limits is not None:
            key_1, key_2 = row_keys(tl.load(epochs + slot), root)
        for step in range(longest):
            target = tl.load(chosen + at + node)
            path = tl.where(steps == step, node, path)
            if limits is None:
                child = tl.min(tl.where(counts & (up == node) & (tokens == target), nodes, num_nodes), axis=0)
                # Once a node has no chosen child, the walk stays at this node in all later steps, so the walk has
                # ended.
                goes = (child < num_nodes) & (step + 1 < longest)
            else:
                child = tl.min(tl.where(counts & (up == node), nodes, num_nodes), axis=0)
                limit = tl.load(limits + step, mask=step < max_depth, other=0)
                drawn = noise_bits(key_1, key_2, tl.full([], 0, dtype=tl.int32) + step) < limit
                goes = walking & drawn & (child < num_nodes) & (step + 1 < longest)
                target = tl.where(goes, tl.sum(tl.where(nodes == child, tokens, 0), axis=0), target)
            emitted = tl.where((steps == step) & walking, target, emitted)
            walking = goes
            node = tl.where(walking, child, node)
            length += walking.to(tl.int64)
    walked, kept = steps < longest, steps < max_path
    nodes_to, tokens_to, told_to = req * longest + steps, req * max_path + steps, out_told + req * num_told
    tl.store(out_nodes + nodes_to, path.to(tl.int64), mask=walked)
    tl.store(out_rows + nodes_to, at + path, mask=walked)
    tl.store(out_num_tokens + req, length)
    tl.store(out_token_ids + tokens_to, emitted, mask=kept)
    tl.store(out_columns + tokens_to, tl.minimum(root + 1 + steps, last_column), mask=kept)
    tl.store(told_to, length)
    tl.store(told_to + 1, count)
    tl.store(told_to + 2 + steps, emitted, mask=kept)
    tl.store(told_to + 2 + max_path + steps, path.to(tl.int64), mask=walked)
    if evidence is not None:
        num_evidence = num_told - 2 - max_path - longest
        columns = tl.arange(0, TOLD)
        seen = tl.load(evidence + req * num_evidence + columns, mask=columns < num_evidence, other=0)
        tl.store(told_to + 2 + max_path + longest + columns, seen, mask=columns < num_evidence)
    if MOVES:
        moved = walked & (steps < length) & (path != steps)
        table = block_tables + slot * num_blocks
        source = address_of(table, root + path, num_blocks, moved, BLOCK_SIZE)
        target = address_of(table, root + steps, num_blocks, moved, BLOCK_SIZE)
        tl.store(out_sources + nodes_to, tl.where(moved, source, 0), mask=walked)
        tl.store(out_targets + nodes_to, tl.where(moved, target, 0), mask=walked)
    if slot != spare:  # several padding rows may share the spare slot, whose state never changes
        tl.store(committed_lens + slot, tl.load(committed_lens + slot) + length)
        tl.store(last_token_ids + slot, tl.sum(tl.where(steps == length - 1, emitted, 0), axis=0))


def settle_paths(walked: WalkedTrees, state: SlotColumns, shape: PathShape) -> SettledPaths:
    """Launches the kernel for `wingbeat.kernels.round.reference.settle_paths`."""
    slots, tree, evidence, draws = walked.slots, walked.tree, walked.evidence, walked.draws
    num_reqs, num_nodes = len(slots), 1 if tree is None else tree.token_ids.shape[1]
    longest = min(shape.max_path, num_nodes)
    num_evidence = 0 if evidence is None else evidence.shape[1]
    num_told = 2 + shape.max_path + longest + num_evidence
    nodes, sources, targets = (slots.new_empty(num_reqs, longest) for _ in range(3))
    token_ids, columns = (slots.new_empty(num_reqs, shape.max_path) for _ in range(2))
    rows, told = slots.new_empty(num_reqs * longest), slots.new_empty(num_reqs, num_told)
    settled = SettledPaths(nodes, slots.new_empty(num_reqs), token_ids, rows, columns, told, sources, targets)
    lanes = triton.next_power_of_2(num_nodes)
    if num_reqs:
        with torch.cuda.device_of(slots):
            _settle_kernel[(num_reqs,)](
                slots.contiguous(),
                walked.roots.contiguous(),
                *_walked_parts(tree),
                walked.chosen.contiguous(),
                None if evidence is None else evidence.contiguous(),
                *((None, None, 0) if draws is None else (draws.limits, draws.epochs, len(draws.limits))),
                state.committed_lens,
                state.last_token_ids,
                state.block_tables,
                *settled,
                len(state.committed_lens) - 1,
                num_nodes,
                longest,
                shape.max_path,
                num_told,
                shape.last_column,
                state.block_tables.shape[1],
                MOVES=shape.moves,
                BLOCK_SIZE=shape.block_size,
                NODES=lanes,
                PATH=triton.next_power_of_2(shape.max_path),
                TOLD=triton.next_power_of_2(max(num_evidence, 1)),
                num_warps=num_warps(lanes),
                **options(fused=False),
            )
    return settled


def _walked_parts(tree: GrownTree | None) -> tuple[Tensor | None, ...]:
    if tree is None:
        return (None,) * 3
    return tuple(part.contiguous() for part in (tree.token_ids, tree.parents, tree.num_valid))
