"""Matrix products of few rows with one weight: torch reference. On GPUs `kernels.gpu.products` reads the weight once.

torch's own matrix product leaves most multiprocessors of a GPU idle if a weight has few tiles. When a model is loaded,
a measurement decides between the two.
"""

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.layer.reference import rms_norm, silu_mul

MOST_ROWS = 64
"""Maximum number of rows that the GPU kernel multiplies."""
LEAST_TILE = 16
"""Minimum number of columns that a program computes."""


def few_rows_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    total: Tensor | None = None,
    counters: Tensor | None = None,
    gated: bool = False,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Computes rows @ weight.T + bias, summed in float32 and rounded once.

    Args:
        rows: [num_rows, inputs], at most `MOST_ROWS` on a GPU.
        weight: [columns, inputs], contiguous.
        total: [num_rows, columns] in the same dtype, to which the product is added in place; None returns a new tensor.
        counters: int32 [ceil(columns / LEAST_TILE)], all zero when no product runs; None allocates new ones.
        gated: returns silu of the first half of the columns, times the second half: [num_rows, columns / 2]. Each half
            is rounded before silu and the multiplication.
        norm: weight [inputs] and epsilon of a root-mean-square norm of the rows before the product. The kernel divides
            the product by the root mean square, and rounds the rows once, after they are multiplied by the weight.
    """
    if kernels := choice.compiled("few_rows_product", rows):
        if counters is None:
            counters = new_counters(weight)
        return kernels.few_rows_product(rows.contiguous(), weight, bias, total, counters, gated, norm)
    out = functional.linear(rows if norm is None else rms_norm(rows, *norm), weight, bias)
    if gated:
        return silu_mul(out)
    return out if total is None else total.add_(out)


def new_counters(weight: Tensor) -> Tensor:
    """Allocates counters for products with a weight; products that use the same counters must not overlap in time."""
    return torch.zeros(-(-len(weight) // LEAST_TILE), dtype=torch.int32, device=weight.device)
