"""Matrix products of rows with their experts' weights: torch reference; GPUs use `kernels.experts.triton`.

A product takes one launch. Rows are sorted by the expert to which they are routed, and each expert's rows are cut into
blocks of one height. The number of blocks is known only on the device. The grid has programs for the largest possible
number of blocks, so the host need not wait for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice

LEAST_HEIGHT, MOST_HEIGHT = 16, 64
"""Minimum and maximum number of rows of a block."""


class Routes(NamedTuple):
    """Assignment of rows to experts, several experts per row."""

    order: Tensor
    """int64 [num_rows * choices]: indices of the (row, choice) pairs in row-major order, sorted by expert."""
    blocks: Tensor
    """int32 [3, blocks]: expert, or -1 for an unused block; first and last index of the block's rows in `order`."""
    height: int
    """Maximum number of rows of a block."""
    num_experts: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> "Routes":
        """Builds routes from chosen experts, int [num_rows, choices], without waiting for the device."""
        flat, count = chosen.flatten(), chosen.numel()
        height = LEAST_HEIGHT
        while height < min(count // num_experts, MOST_HEIGHT):
            height *= 2
        order = flat.argsort(stable=True)
        rows = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        rows.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
        ends, blocks_ends = rows.cumsum(0), ((rows + height - 1) // height).cumsum(0)
        block = torch.arange(min(count, num_experts) + count // height, device=flat.device)
        expert = torch.searchsorted(blocks_ends, block, right=True)
        known = expert.clamp(max=num_experts - 1)
        before = blocks_ends[known] - (rows[known] + height - 1) // height
        first = ends[known] - rows[known] + (block - before) * height
        last = torch.minimum(first + height, ends[known]) - 1
        expert = torch.where(expert < num_experts, expert, -1)
        return cls(order, torch.stack([expert, first, last]).int(), height, num_experts)


def grouped_product(rows: Tensor, weight: Tensor, bias: Tensor | None, routes: Routes) -> Tensor:
    """Multiplies rows by their experts' weights, summing in float32.

    Args:
        rows: [num_rows, inputs], one per token; or [num_rows * choices, inputs], one per choice.
        weight: [num_experts, columns, inputs], of any strides.
        bias: [num_experts, columns].

    Returns:
        [num_rows * choices, columns] in the rows' dtype, ordered by row, then by choice.
    """
    out = rows.new_empty(len(routes.order), weight.shape[1])
    if kernels := choice.compiled("grouped_product", rows):
        kernels.grouped_product(rows.contiguous(), weight, bias, out, routes)
        return out
    choices = len(out) // max(len(rows), 1)
    for expert, first, last in routes.blocks.t().tolist():
        if expert >= 0:
            places = routes.order[first : last + 1]
            own = functional.linear(rows[places // choices].float(), weight[expert].float())
            out[places] = (own if bias is None else own + bias[expert].float()).to(out.dtype)
    return out
