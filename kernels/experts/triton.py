"""Choice of experts, routes, grouped matrix products with the weights of experts, and their sums on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.experts.product import Gate, Routes, Shared
from wingbeat.kernels.experts.router import Rule
from wingbeat.kernels.launching import options, wait_for_launch

_OUT_TILE, _IN_TILE = 64, 64
_MATCHES, _SCAN = 8192, 512
"""Comparisons of choices with experts, and choices of a running sum, that a program of the routes holds at a time."""
_SUM_TILE = 512


@triton.jit
def _choose_experts_kernel(
    logits_ptr,  # [num_rows, num_experts]
    bias_ptr,  # float32 [num_experts], or None
    shared_ptr,  # [num_rows]: logits of the shared choices' weight, or None
    weights_ptr,  # [num_rows, TOP_K + SHARED]
    chosen_ptr,  # int64 [num_rows, TOP_K + SHARED]
    num_experts,
    least,
    scale,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,  # number of groups from which experts are chosen
    BEST: tl.constexpr,  # number of best scores, 1 or 2, whose sum ranks a group
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    real = expert < num_experts
    logits = tl.load(logits_ptr + row * num_experts + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores /= tl.sum(scores, 0)
    left = logits
    if bias_ptr is not None:
        left = tl.where(real, scores + tl.load(bias_ptr + expert, mask=real, other=0.0), float("-inf"))
    elif KEPT < GROUPS:
        left = tl.where(real, scores, float("-inf"))
    if KEPT < GROUPS:
        group, number = expert // (num_experts // GROUPS), tl.arange(0, GROUP_TILE)
        sums, kept_experts = tl.full([GROUP_TILE], float("-inf"), tl.float32), tl.zeros([EXPERTS], tl.int32)
        for index in tl.range(GROUPS):
            own = tl.where(real & (group == index), left, float("-inf"))
            total = tl.max(own, 0)
            if BEST == 2:
                first = tl.min(tl.where(own == total, expert, num_experts), 0)
                total += tl.max(tl.where(expert == first, float("-inf"), own), 0)
            sums = tl.where(number == index, total, sums)
        for _ in tl.range(KEPT):
            best_group = tl.min(tl.where(sums == tl.max(sums, 0), number, GROUPS - 1), 0)
            kept_experts = tl.where(group == best_group, 1, kept_experts)
            sums = tl.where(number == best_group, float("-inf"), sums)
        left = tl.where(kept_experts == 1, left, float("-inf"))
    kept, picked = tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.int32)
    for index in tl.range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, num_experts - 1), 0)  # the last one if all are NaN
        kept = tl.where(place == index, tl.sum(tl.where(expert == best, scores, 0.0), 0), kept)
        picked = tl.where(place == index, best, picked)
        left = tl.where(expert == best, float("-inf"), left)
    if NORMALISED:
        kept /= tl.sum(kept, 0) + least
    kept *= scale
    if SHARED:
        of_shared = 1.0
        if shared_ptr is not None:
            of_shared = 1.0 / (1.0 + tl.exp(-tl.load(shared_ptr + row).to(tl.float32)))
        kept = tl.where(place < TOP_K, kept, of_shared)
        picked = tl.where(place < TOP_K, picked, num_experts + place - TOP_K)
    to, real = row * (TOP_K + SHARED) + place, place < TOP_K + SHARED
    tl.store(weights_ptr + to, kept.to(weights_ptr.dtype.element_ty), mask=real)
    tl.store(chosen_ptr + to, picked.to(tl.int64), mask=real)


def choose(logits: Tensor, bias: Tensor | None, rule: Rule, shared_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.experts.router.choose`."""
    (num_rows, num_experts), choices = logits.shape, rule.top_k + rule.num_shared
    weights = logits.new_empty(num_rows, choices, dtype=rule.dtype)
    chosen = logits.new_empty(num_rows, choices, dtype=torch.int64)
    if num_rows:
        with torch.cuda.device_of(logits):
            _choose_experts_kernel[(num_rows,)](
                logits.contiguous(),
                None if bias is None else bias.contiguous(),
                shared_logits,
                weights,
                chosen,
                num_experts,
                rule.least,
                rule.scale,
                TOP_K=rule.top_k,
                SHARED=rule.num_shared,
                SIGMOID=rule.sigmoid,
                NORMALISED=rule.normalised,
                GROUPS=rule.num_groups,
                KEPT=rule.kept_groups,
                BEST=rule.group_best,
                EXPERTS=triton.next_power_of_2(num_experts),
                CHOICES=triton.next_power_of_2(choices),
                GROUP_TILE=triton.next_power_of_2(rule.num_groups),
                num_warps=1,  # sums within a warp need no shared memory
                **options(fused=True),
            )
    return weights, chosen


@triton.jit(do_not_specialize=["count", "num_blocks"])
def _route_experts_kernel(
    chosen_ptr,  # int [count]: experts of the pairs
    order_ptr,  # int64 [count]
    blocks_ptr,  # int32 [3, num_blocks]
    count,
    num_blocks,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Places the pairs and blocks of one expert; every program counts the pairs of all experts."""
    wait_for_launch(EARLY)
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    matches = tl.zeros([TILE, EXPERTS], tl.int32)
    for begin in tl.range(0, count, TILE):
        pair = begin + tl.arange(0, TILE)
        chosen = tl.load(chosen_ptr + pair, mask=pair < count, other=-1).to(tl.int32)
        matches += (chosen[:, None] == expert[None, :]).to(tl.int32)
    counts = tl.sum(matches, 0)
    blocks = (counts + HEIGHT - 1) // HEIGHT
    first = tl.sum(tl.where(expert < own, counts, 0), 0)
    end = first + tl.sum(tl.where(expert == own, counts, 0), 0)
    block = tl.sum(tl.where(expert < own, blocks, 0), 0)
    place = first
    for begin in tl.range(0, count, SCAN):
        pair = begin + tl.arange(0, SCAN)
        mine = tl.load(chosen_ptr + pair, mask=pair < count, other=-1).to(tl.int32) == own
        to = place + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + to, pair.to(tl.int64), mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    for begin in tl.range(first, end, HEIGHT):
        tl.store(blocks_ptr + block, own)
        tl.store(blocks_ptr + num_blocks + block, begin)
        tl.store(blocks_ptr + 2 * num_blocks + block, tl.minimum(begin + HEIGHT, end) - 1)
        block += 1
    if own == tl.num_programs(0) - 1:
        for begin in tl.range(block, num_blocks, SCAN):
            unused = begin + tl.arange(0, SCAN)
            tl.store(blocks_ptr + unused, -1, mask=unused < num_blocks)


def routes(chosen: Tensor, num_experts: int, num_blocks: int, height: int) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.experts.product.Routes.of`; returns order and blocks."""
    experts = triton.next_power_of_2(num_experts)
    order = chosen.new_empty(len(chosen), dtype=torch.int64)
    blocks = chosen.new_empty(3, num_blocks, dtype=torch.int32)
    if len(chosen):
        with torch.cuda.device_of(chosen):
            _route_experts_kernel[(num_experts,)](
                chosen,
                order,
                blocks,
                len(chosen),
                num_blocks,
                EXPERTS=experts,
                HEIGHT=height,
                TILE=min(max(_MATCHES // experts, 1), _SCAN),
                SCAN=_SCAN,
                num_warps=8,
                **options(fused=True),
            )
    return order, blocks


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped_product_kernel(
    inputs_ptr,  # [num_rows, in_features]
    weight_ptr,  # [num_experts, columns, in_features]
    bias_ptr,  # [num_experts, columns], or None
    shared_ptr,  # weight of shared experts, whose ids begin with `num_experts`, or None; of their gates if GATED
    shared_up_ptr,  # weight of their ups, `distance` elements behind `shared_ptr`
    order_ptr,  # int64 [num_rows * CHOICES], sorted by expert
    blocks_ptr,  # int32 [3, num_blocks]: expert, and first and last index of the block's rows in `order_ptr`
    out_ptr,  # [num_rows * CHOICES, columns], or half as many columns if GATED
    num_blocks,
    in_features,
    num_columns,
    stride_expert,
    stride_out,
    stride_in,
    num_experts,
    stride_shared_expert,
    stride_shared_out,
    distance,
    alpha,
    limit,
    shift,
    CHOICES: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # whether gates and ups alternate in the weight; they alternate in a tile
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes some columns of one block of an expert's rows."""
    wait_for_launch(EARLY)
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(blocks_ptr + num_blocks + block) + tl.arange(0, ROWS)
    live = places <= tl.load(blocks_ptr + 2 * num_blocks + block)
    rows = tl.load(order_ptr + places, mask=live, other=0)
    columns = tl.program_id(0) * OUT + tl.arange(0, OUT)
    real = columns < num_columns
    source = weight_ptr
    if shared_ptr is not None:
        is_shared = expert >= num_experts
        expert = tl.where(is_shared, expert - num_experts, expert)
        stride_expert = tl.where(is_shared, stride_shared_expert, stride_expert)
        stride_out = tl.where(is_shared, stride_shared_out, stride_out)
        source = tl.where(is_shared, shared_ptr, source)
    offsets = columns.to(tl.int64) * stride_out
    if GATED and not INTERLEAVED:
        # Addresses chosen column by column would be loaded two bytes at a time; added distances keep long loads.
        to_up = (num_columns // 2).to(tl.int64) * stride_out
        if shared_ptr is not None:
            to_up = tl.where(is_shared, distance, to_up)
        offsets = (columns // 2).to(tl.int64) * stride_out + columns % 2 * to_up
        columns = columns % 2 * (num_columns // 2) + columns // 2
    row_ptrs = inputs_ptr + (rows // CHOICES)[:, None] * in_features
    column_ptrs = (source + expert * stride_expert + offsets)[None, :]
    acc = tl.zeros([ROWS, OUT], tl.float32)
    for begin in tl.range(0, in_features, IN):
        at = begin + tl.arange(0, IN)
        known = at < in_features
        inputs = tl.load(row_ptrs + at[None, :], mask=live[:, None] & known[None, :], other=0.0)
        weight = tl.load(
            column_ptrs + at.to(tl.int64)[:, None] * stride_in, mask=known[:, None] & real[None, :], other=0.0
        )
        acc = tl.dot(inputs, weight, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * num_columns + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [ROWS, OUT // 2, 2]))
        if LIMITED:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        made = gate / (1.0 + tl.exp(-alpha * gate)) * (up + shift)
        column, size = tl.program_id(0) * (OUT // 2) + tl.arange(0, OUT // 2), num_columns // 2
        to = out_ptr + rows[:, None] * size + column[None, :]
        tl.store(to, made.to(out_ptr.dtype.element_ty), mask=live[:, None] & (column < size)[None, :])
    else:
        to = out_ptr + rows[:, None] * num_columns + columns[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & real[None, :])


def grouped_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    routes: Routes,
    gate: Gate | None = None,
    shared: Shared | None = None,
) -> None:
    """Launches the kernel for `wingbeat.kernels.experts.product.grouped_product`."""
    if not len(out):
        return
    (num_experts, columns, inputs), num_blocks, given = weight.shape, routes.blocks.shape[1], gate or Gate()
    of_shared, strides = (), (0, 0, 0)
    if shared is not None:
        if bias is not None or given.interleaved or weight.stride(2) != 1:
            raise ValueError("shared experts need weights by output, no bias and gates side by side")
        of_shared = shared.weights
        distance = (of_shared[-1].data_ptr() - of_shared[0].data_ptr()) // rows.element_size()
        strides = (*((columns // 2 * inputs, inputs) if gate else (inputs, shared.count * inputs)), distance)
    with torch.cuda.device_of(rows):
        _grouped_product_kernel[(triton.cdiv(columns, _OUT_TILE), num_blocks)](
            rows,
            weight,
            None if bias is None else bias.contiguous(),
            *(*of_shared, None, None)[:2],
            routes.order,
            routes.blocks,
            out,
            num_blocks,
            inputs,
            columns,
            *weight.stride(),
            num_experts,
            *strides,
            given.alpha,
            given.limit,
            given.shift,
            CHOICES=len(out) // len(rows),
            GATED=gate is not None,
            INTERLEAVED=given.interleaved,
            LIMITED=given.limit != float("inf"),
            ROWS=routes.height,
            OUT=_OUT_TILE,
            IN=_IN_TILE,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
            **options(fused=True),
        )


@triton.jit
def _sum_experts_kernel(
    each_ptr,  # [num_rows, CHOICES, size]
    weights_ptr,  # [num_rows, CHOICES]
    out_ptr,  # [num_rows, size]
    size,
    CHOICES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros([TILE], tl.float32)
    for index in tl.static_range(CHOICES):
        weight = tl.load(weights_ptr + row * CHOICES + index).to(tl.float32)
        each = tl.load(each_ptr + (row * CHOICES + index) * size + at, mask=inside, other=0.0)
        total += weight * each.to(tl.float32)
    tl.store(out_ptr + row * size + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_choices(each: Tensor, weights: Tensor) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.experts.product.sum_choices`."""
    (num_rows, choices), size = weights.shape, each.shape[1]
    out = each.new_empty(num_rows, size)
    if out.numel():
        with torch.cuda.device_of(each):
            _sum_experts_kernel[(num_rows, triton.cdiv(size, _SUM_TILE))](
                each,
                weights.contiguous(),
                out,
                size,
                CHOICES=choices,
                TILE=_SUM_TILE,
                num_warps=4,
                **options(fused=True),
            )
    return out
