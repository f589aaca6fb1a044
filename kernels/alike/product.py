"""Batch-invariant matrix products with a weight, and their torch reference.

The inputs are divided into splits that depend on the weight's shape and the device alone. Each split is summed by
itself, and the splits' sums are added in a fixed order. Therefore the bits of a result row do not depend on the other
rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels import choice

STEP = 64
"""Number of inputs (elements of the summed dimension) per step of the inner loop."""


class AlikeWeight(NamedTuple):
    """Weight of a batch-invariant matrix product, with the kernel's scratch counters."""

    weight: Tensor
    """[columns, inputs], contiguous"""
    counters: Tensor
    """int32 [tiles of columns * 2]: number of programs that have finished each tile; all zero when no product runs. The
    factor 2 is the maximum number of tiles of rows."""

    @classmethod
    def wrap(cls, weight: Tensor) -> "AlikeWeight":
        """Wraps a weight [columns, inputs] without copying or reordering the weight."""
        return cls(weight, torch.zeros(2 * -(-len(weight) // STEP), dtype=torch.int32, device=weight.device))

    def product(self, rows: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Computes rows @ weight.T + bias in float32: [num_rows, inputs] -> [num_rows, columns] in `dtype`.

        Args:
            out: result buffer; None allocates a new buffer.
        """
        if out is None:
            out = rows.new_empty(len(rows), len(self.weight), dtype=dtype)
        if kernels := choice.compiled("alike_product", rows):
            return kernels.product(rows.contiguous(), self, bias, out, False)
        return out.copy_(self._summed(rows, bias))

    def add_product(self, total: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Adds the product to `total` [num_rows, columns] in place, rounds the sum once, and returns `total`."""
        if kernels := choice.compiled("alike_product", rows):
            return kernels.product(rows.contiguous(), self, bias, total, True)
        return total.copy_(total.float() + self._summed(rows, bias))

    def _summed(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        # torch may choose another order of summation for another batch size. In float64 the resulting difference is
        # below float32's resolution.
        out = (rows.double() @ self.weight.double().t()).float()
        return out if bias is None else out + bias.float()
