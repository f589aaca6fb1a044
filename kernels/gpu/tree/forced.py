"""The walk of a drawn length on a GPU, the kernel behind `tree.forced`: one launch, a request a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.sampling.noise import noise_bits, row_keys
from wingbeat.kernels.gpu.tree.walk import num_warps
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.tree.forced import Draws
from wingbeat.kernels.tree.results import WalkResult


@triton.jit
def _forced_walk_kernel(
    token_ids,
    parents,
    num_valid,
    target_token_ids,
    limits,
    epochs,
    slots,
    positions,
    out_nodes,
    out_num_tokens,
    out_token_ids,
    num_nodes,
    max_path,
    max_depth,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, NODES)
    mask = nodes < num_nodes
    at = req * num_nodes
    up = tl.maximum(tl.load(parents + at + nodes, mask=mask, other=0), 0)
    counts = mask & (nodes > 0) & (nodes < tl.load(num_valid + req))
    key_1, key_2 = row_keys(tl.load(epochs + tl.load(slots + req)), tl.load(positions + req))
    node = tl.full([], 0, dtype=tl.int32)
    length = tl.full([], 1, dtype=tl.int64)
    walking = tl.full([], 1, dtype=tl.int32) > 0
    zero = tl.full([], 0, dtype=tl.int32)
    for step in range(max_path):
        tl.store(out_nodes + req * max_path + step, node.to(tl.int64))
        child = tl.min(tl.where(counts & (up == node), nodes, num_nodes), axis=0)
        drawn = noise_bits(key_1, key_2, zero + step) < tl.load(limits + step, mask=step < max_depth, other=0)
        goes = walking & drawn & (child < num_nodes) & (step + 1 < max_path)
        drafted = tl.load(token_ids + at + child, mask=goes, other=0)
        target = tl.load(target_token_ids + at + node)
        tl.store(out_token_ids + req * max_path + step, tl.where(walking, tl.where(goes, drafted, target), 0))
        node = tl.where(goes, child, node)
        walking = goes
        length += goes.to(tl.int64)
    tl.store(out_num_tokens + req, length)


def forced_walk(
    token_ids: Tensor, parents: Tensor, num_valid: Tensor, target_token_ids: Tensor, draws: Draws, max_path: int
) -> WalkResult:
    num_reqs, num_nodes = token_ids.shape
    nodes, tokens = (torch.empty(num_reqs, max_path, dtype=torch.int64, device=token_ids.device) for _ in range(2))
    num_tokens = torch.empty(num_reqs, dtype=torch.int64, device=token_ids.device)
    lanes = triton.next_power_of_2(num_nodes)
    if num_reqs:
        with torch.cuda.device_of(token_ids):
            _forced_walk_kernel[(num_reqs,)](
                token_ids.contiguous(),
                parents.contiguous(),
                num_valid.contiguous(),
                target_token_ids.contiguous(),
                draws.limits,
                draws.epochs,
                draws.slots.contiguous(),
                draws.positions.contiguous(),
                nodes,
                num_tokens,
                tokens,
                num_nodes,
                max_path,
                len(draws.limits),
                NODES=lanes,
                num_warps=num_warps(lanes),
                **options(fused=False),
            )
    return WalkResult(nodes, num_tokens, tokens)
