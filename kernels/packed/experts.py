"""Matrix products with packed weights of experts, whose columns are concatenated in one matrix: torch reference."""

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.experts.product import Routes
from wingbeat.kernels.packed.matrix import PackedMatrix, unpack


def experts_product(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, routes: Routes) -> Tensor:
    """Multiplies rows by their experts' weights, summing in float32.

    Args:
        rows: [num_rows, inputs], one per token; or [num_rows * choices, inputs], one per choice.
        matrix: columns of all experts, expert by expert.
        bias: [columns of all experts], or None.

    Returns:
        float32 [num_rows * choices, columns of an expert], ordered by row, then by choice.
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
        weight = unpack(matrix.select_columns(own), rows.dtype).float()
        out[places] = functional.linear(rows[places // choices].float(), weight, None if bias is None else bias[own])
    return out
