"""Walks and masks of draft trees on a GPU; the reference is `tree`. Each function is one launch.

Each program handles one request, in registers. Trees are small, so the time depends mostly on the number of launches.
The host never waits for the device, and launches depend on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.tree.results import WalkResult

WORD_BITS = tl.constexpr(64)


def num_warps(lanes: int) -> int:
    """Number of warps with four elements per thread, so that small trees fit into one warp and need no barrier."""
    return min(max(triton.next_power_of_2(lanes) // 128, 1), 16)


@triton.jit
def column_bit(columns):
    """Word in which only the bit of an int64 column is set."""
    return tl.full([], 1, dtype=tl.int64) << (columns & (WORD_BITS - 1))


@triton.jit
def _walk_kernel(
    token_ids,
    parents,
    num_valid,
    target_token_ids,
    out_nodes,
    out_num_tokens,
    out_token_ids,
    num_nodes,
    max_path,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, NODES)
    mask = nodes < num_nodes
    at = req * num_nodes
    tokens = tl.load(token_ids + at + nodes, mask=mask, other=0)
    up = tl.maximum(tl.load(parents + at + nodes, mask=mask, other=0), 0)
    counts = mask & (nodes > 0) & (nodes < tl.load(num_valid + req))
    node = tl.full([], 0, dtype=tl.int32)
    length = tl.full([], 1, dtype=tl.int64)
    walking = tl.full([], 1, dtype=tl.int32) > 0
    for step in range(max_path):
        target = tl.load(target_token_ids + at + node)
        tl.store(out_nodes + req * max_path + step, node.to(tl.int64))
        tl.store(out_token_ids + req * max_path + step, tl.where(walking, target, 0))
        child = tl.min(tl.where(counts & (up == node) & (tokens == target), nodes, num_nodes), axis=0)
        # Once a node has no chosen child, the walk stays at this node in all later steps, so the walk has ended.
        walking = (child < num_nodes) & (step + 1 < max_path)
        node = tl.where(walking, child, node)
        length += walking.to(tl.int64)
    tl.store(out_num_tokens + req, length)


def walk_tree(
    token_ids: Tensor, parents: Tensor, num_valid: Tensor, target_token_ids: Tensor, max_path: int
) -> WalkResult:
    num_reqs, num_nodes = token_ids.shape
    nodes, tokens = (torch.empty(num_reqs, max_path, dtype=torch.int64, device=token_ids.device) for _ in range(2))
    num_tokens = torch.empty(num_reqs, dtype=torch.int64, device=token_ids.device)
    lanes = triton.next_power_of_2(num_nodes)
    if num_reqs:
        with torch.cuda.device_of(token_ids):
            _walk_kernel[(num_reqs,)](
                token_ids.contiguous(),
                parents.contiguous(),
                num_valid.contiguous(),
                target_token_ids.contiguous(),
                nodes,
                num_tokens,
                tokens,
                num_nodes,
                max_path,
                NODES=lanes,
                num_warps=num_warps(lanes),
                **options(fused=False),
            )
    return WalkResult(nodes, num_tokens, tokens)


@triton.jit
def _ancestors_kernel(
    parents,
    out_mask,
    out_words,
    num_nodes,
    num_words,
    max_depth,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes one mask word of the ancestors of ROWS nodes, stored packed or as 64 columns."""
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    word = tl.program_id(2)
    nodes = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = nodes < num_nodes
    at = req * num_nodes
    ancestors = tl.where(mask, nodes, 0).to(tl.int64)
    bits = tl.where(ancestors // WORD_BITS == word, column_bit(ancestors), 0)
    for _ in range(max_depth):
        ancestors = tl.maximum(tl.load(parents + at + ancestors), 0)
        bits |= tl.where(ancestors // WORD_BITS == word, column_bit(ancestors), 0)
    if PACK:
        tl.store(out_words + (at + nodes) * num_words + word, bits, mask=mask)
    else:
        columns = word * WORD_BITS + tl.arange(0, WORD_BITS)
        seen = (bits[:, None] >> tl.arange(0, WORD_BITS).to(tl.int64)[None, :]) & 1
        to = (at + nodes)[:, None] * num_nodes + columns[None, :]
        tl.store(out_mask + to, seen.to(tl.uint8), mask=mask[:, None] & (columns < num_nodes)[None, :])


def ancestors(parents: Tensor, max_depth: int | None, *, pack: bool) -> Tensor:
    """Runs `tree.ancestor_mask`, or `tree.ancestor_words` if `pack`."""
    num_reqs, num_nodes = parents.shape
    num_words = triton.cdiv(num_nodes, WORD_BITS.value)
    shape, dtype = (num_words, torch.int64) if pack else (num_nodes, torch.uint8)
    out = torch.empty(num_reqs, num_nodes, shape, dtype=dtype, device=parents.device)
    rows = min(triton.next_power_of_2(num_nodes), 64)
    if out.numel():
        with torch.cuda.device_of(parents):
            _ancestors_kernel[(num_reqs, triton.cdiv(num_nodes, rows), num_words)](
                parents.contiguous(),
                out,
                out,
                num_nodes,
                num_words,
                num_nodes - 1 if max_depth is None else max_depth,
                PACK=pack,
                ROWS=rows,
                **options(fused=False),
            )
    return out if pack else out.view(torch.bool)


@triton.jit
def _paths_kernel(token_ids, parents, out, num_nodes, max_depth, ROWS: tl.constexpr, EARLY: tl.constexpr):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    nodes = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = nodes < num_nodes
    at = req * num_nodes
    ancestors = tl.where(mask, nodes, 0).to(tl.int64)
    for step in range(max_depth):
        tokens = tl.where(ancestors > 0, tl.load(token_ids + at + ancestors), -1)
        tl.store(out + (at + nodes) * max_depth + step, tokens, mask=mask)
        ancestors = tl.maximum(tl.load(parents + at + ancestors), 0)


def path_token_ids(token_ids: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    num_reqs, num_nodes = token_ids.shape
    out = torch.empty(num_reqs, num_nodes, max_depth, dtype=torch.int64, device=token_ids.device)
    rows = min(triton.next_power_of_2(num_nodes), 64)
    if out.numel():
        with torch.cuda.device_of(token_ids):
            _paths_kernel[(num_reqs, triton.cdiv(num_nodes, rows))](
                token_ids.contiguous(),
                parents.contiguous(),
                out,
                num_nodes,
                max_depth,
                ROWS=rows,
                **options(fused=False),
            )
    return out
