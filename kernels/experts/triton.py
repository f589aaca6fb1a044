"""Grouped matrix products with the weights of experts on a GPU.

A program computes some columns of one block of an expert's rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.experts.product import Routes
from wingbeat.kernels.launching import options, wait_for_launch

_OUT_TILE, _IN_TILE = 64, 64


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped_product_kernel(
    inputs_ptr,  # [num_rows, in_features]
    weight_ptr,  # [num_experts, out_features, in_features]
    bias_ptr,  # [num_experts, out_features], or None
    order_ptr,  # int64 [num_rows * CHOICES], sorted by expert
    blocks_ptr,  # int32 [3, num_blocks]: expert, and first and last index of the block's rows in `order_ptr`
    out_ptr,  # [num_rows * CHOICES, out_features]
    num_blocks,
    in_features,
    out_features,
    stride_expert,
    stride_out,
    stride_in,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(blocks_ptr + num_blocks + block) + tl.arange(0, ROWS)
    live = places <= tl.load(blocks_ptr + 2 * num_blocks + block)
    rows = tl.load(order_ptr + places, mask=live, other=0)
    columns = tl.program_id(0) * OUT + tl.arange(0, OUT)
    real = columns < out_features
    row_ptrs = inputs_ptr + (rows // CHOICES)[:, None] * in_features
    column_ptrs = weight_ptr + expert * stride_expert + columns.to(tl.int64)[None, :] * stride_out
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
        acc += tl.load(bias_ptr + expert * out_features + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + rows[:, None] * out_features + columns[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & real[None, :])


def grouped_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, routes: Routes) -> None:
    """Launches the kernel for `wingbeat.kernels.experts.product.grouped_product`."""
    if not len(out):
        return
    num_blocks, columns = routes.blocks.shape[1], weight.shape[1]
    with torch.cuda.device_of(rows):
        _grouped_product_kernel[(triton.cdiv(columns, _OUT_TILE), num_blocks)](
            rows,
            weight,
            None if bias is None else bias.contiguous(),
            routes.order,
            routes.blocks,
            out,
            num_blocks,
            rows.shape[1],
            columns,
            *weight.stride(),
            CHOICES=len(out) // len(rows),
            ROWS=routes.height,
            OUT=_OUT_TILE,
            IN=_IN_TILE,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
            **options(fused=True),
        )
