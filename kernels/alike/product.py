"""Products by weights in which a row has the same bits whatever is beside it; the torch reference.

The inputs are summed in parts that are the weight's own, and the parts in their order, whoever does them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels import choice

STEP = 64
"""Inputs of a step."""


class AlikeWeight(NamedTuple):
    """A weight, and how its inputs are summed."""

    weight: Tensor
    """[columns, inputs], contiguous"""
    counters: Tensor
    """int32 [tiles of columns, of two tiles of rows], zeros between products: programs that are done with a tile."""

    @classmethod
    def of(cls, weight: Tensor) -> "AlikeWeight":
        """A weight as it lies in memory."""
        return cls(weight, torch.zeros(2 * -(-len(weight) // STEP), dtype=torch.int32, device=weight.device))

    def product(self, rows: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """rows @ weight.T + bias, summed in float32: [num_rows, inputs] -> [num_rows, columns] in `dtype`.

        Args:
            out: where they go; None makes room.
        """
        if out is None:
            out = rows.new_empty(len(rows), len(self.weight), dtype=dtype)
        if kernels := choice.compiled("alike_product", rows):
            return kernels.product(rows.contiguous(), self, bias, out, False)
        return out.copy_(self._summed(rows, bias))

    def add_product(self, total: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """A total [num_rows, columns], which changes, and the product, rounded once."""
        if kernels := choice.compiled("alike_product", rows):
            return kernels.product(rows.contiguous(), self, bias, total, True)
        return total.copy_(total.float() + self._summed(rows, bias))

    def _summed(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        # Of sums in double, float32 keeps nothing of the order that other rows lead to.
        out = (rows.double() @ self.weight.double().t()).float()
        return out if bias is None else out + bias.float()
