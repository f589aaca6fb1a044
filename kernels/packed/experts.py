"""Products by the weights of experts, which lie side by side in one matrix; the torch reference.

Rows are sorted by the expert that they are sent to, and each expert's are cut into blocks of one height. How many
blocks there are is known to the device alone: the grid has as many as there can be.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.packed.matrix import FEW_ROWS, LEAST_TILE, PackedMatrix, unpack


class Routes(NamedTuple):
    """Experts of rows, several for each."""

    order: Tensor
    """int64 [num_rows * choices]: choices, row by row, sorted by their experts"""
    blocks: Tensor
    """int32 [3, blocks]: expert, or -1 where there is no such block; first and last place in that order"""
    height: int
    """Rows of a block, at most."""
    num_experts: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> "Routes":
        """Routes of int [num_rows, choices]; nothing waits for the device."""
        flat, count = chosen.flatten(), chosen.numel()
        height = LEAST_TILE
        while height < min(count // num_experts, FEW_ROWS):
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


def experts_product(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, routes: Routes) -> Tensor:
    """Products of rows by their experts' weights, summed in float32.

    Args:
        rows: [num_rows, inputs] of tokens, or of their choices.
        matrix: columns of all experts, one expert's after the other's.
        bias: likewise.

    Returns:
        float32 [num_rows * choices, columns of an expert], row by row.
    """
    out = rows.new_empty(len(routes.order), matrix.columns // routes.num_experts, dtype=torch.float32)
    if kernels := choice.compiled("packed_product", rows):
        kernels.experts_product(rows.contiguous(), matrix, bias, out, routes)
        return out
    choices, columns = len(out) // max(len(rows), 1), out.shape[1]
    for expert, first, last in routes.blocks.t().tolist():
        if expert < 0:
            continue
        places, own = routes.order[first : last + 1], slice(expert * columns, (expert + 1) * columns)
        weight = unpack(matrix.of(own), rows.dtype).float()
        out[places] = functional.linear(rows[places // choices].float(), weight, None if bias is None else bias[own])
    return out
