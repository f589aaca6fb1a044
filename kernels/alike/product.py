"""Batch-invariant products by a weight, with their torch reference.

Inputs are summed in splits that depend on the weight's shape and the device alone, and the splits' sums are added in a
fixed order, so that the bits of a row do not depend on the other rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels import choice

STEP = 64
"""Inputs that one step of the inner loop multiplies."""


class AlikeWeight(NamedTuple):
    """Weight of a batch-invariant product, with the kernel's scratch counters."""

    weight: Tensor
    """[columns, inputs], contiguous"""
    counters: Tensor
    """int32 [tiles of columns * 2], for at most two tiles of rows: number of programs that have finished each tile. All
    zero between products."""

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
        """Adds the product to `total` [num_rows, columns] in place, rounding once, and returns `total`."""
        if kernels := choice.compiled("alike_product", rows):
            return kernels.product(rows.contiguous(), self, bias, total, True)
        return total.copy_(total.float() + self._summed(rows, bias))

    def _summed(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        # torch may sum in another order in another batch. With sums in float64 the difference is below float32's
        # resolution.
        out = (rows.double() @ self.weight.double().t()).float()
        return out if bias is None else out + bias.float()
