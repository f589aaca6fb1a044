"""Products of few rows by one weight: the torch reference; on GPUs `kernels.gpu.products` reads the weight once.

A device's own product leaves most of its multiprocessors idle where a weight has few tiles; whoever loads a model holds
both against each other.
"""

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.layer.reference import silu_mul

MOST_ROWS = 64
"""Rows of a product that a kernel takes."""
LEAST_TILE = 16
"""Columns of a program, at least."""


def few_rows_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    total: Tensor | None = None,
    counters: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """rows @ weight.T + bias, summed in float32 and rounded once.

    Args:
        rows: [num_rows, inputs], at most `MOST_ROWS` on a GPU.
        weight: [columns, inputs], contiguous.
        total: [num_rows, columns] in the same dtype, which the product is added to in place; None makes a new one.
        counters: int32 [ceil(columns / LEAST_TILE)], zeros between products; made anew where None.
        gated: silu of the first half of the columns, times the second: [num_rows, columns / 2], each half rounded.
    """
    if kernels := choice.compiled("few_rows_product", rows):
        if counters is None:
            counters = new_counters(weight)
        return kernels.few_rows_product(rows.contiguous(), weight, bias, total, counters, gated)
    out = functional.linear(rows, weight, bias)
    if gated:
        return silu_mul(out)
    return out if total is None else total.add_(out)


def new_counters(weight: Tensor) -> Tensor:
    """Counters of a weight's products, of which one at a time may run."""
    return torch.zeros(-(-len(weight) // LEAST_TILE), dtype=torch.int32, device=weight.device)
