"""Linear layers on GPUs in which a row's output does not depend on the other rows."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from wingbeat.kernels.alike.product import AlikeWeight
from wingbeat.runtime.fused.attention import join_weights
from wingbeat.runtime.verifier.layers.linears import RowsLinear


class AlikeLinear(RowsLinear):
    """A frozen linear layer in which a row's output has the same bits in every batch."""

    multiplies = alike = True
    counters: Tensor

    def repack(self) -> None:
        """See `PackableLinear.repack`."""
        self.__dict__["counters"] = AlikeWeight.wrap(self.weight.data).counters

    def product(self, rows: Tensor) -> Tensor:
        """See `PackableLinear.product`."""
        dtype = torch.float32 if self.wide else rows.dtype
        return AlikeWeight(self.weight.data, self.counters).product(rows, self.bias, dtype, self.into)

    def add_product(self, total: Tensor, rows: Tensor) -> Tensor:
        """See `PackableLinear.add_product`."""
        return AlikeWeight(self.weight.data, self.counters).add_product(total, rows, self.bias)


def lay_out_linears(module: nn.Module, deterministic: bool) -> None:
    """See `runtime.parts`."""
    for linear in module.modules() if deterministic else ():
        if type(linear) is nn.Linear and linear.weight.is_cuda:
            linear.__class__ = AlikeLinear
            linear.repack()


def join_packed(linears: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor] | None:
    """See `runtime.parts`."""
    if not all(isinstance(one, AlikeLinear) for one in linears):
        return None
    weight, bias = join_weights(linears)
    return partial(AlikeWeight.wrap(weight).product, bias=bias, dtype=weight.dtype)
