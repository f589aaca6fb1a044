"""Weights of linear layers laid out for the few rows of a decode round."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def lay_out_linears(module: nn.Module) -> int:
    """Store float32 weights on the CPU input by input, as [out, in] with strides (1, out); returns how many linears.

    With these strides the product of eight rows, a chain to be verified, takes half the time that PyTorch's own layout
    asks for, and one row takes no longer. Shapes, names and values stay; tied embeddings are re-laid with their head.
    Other dtypes and devices have kernels that want the usual layout, and are left alone.
    """
    num_laid = 0
    for linear in module.modules():
        if not isinstance(linear, nn.Linear) or linear.weight.device.type != "cpu":
            continue
        if linear.weight.dtype != torch.float32:
            continue
        linear.weight.data = linear.weight.data.t().contiguous().t()
        if type(linear) is nn.Linear and linear.bias is None and not linear.weight.requires_grad:
            linear.__class__ = InputMajorLinear
            linear.lay()
        num_laid += 1
    return num_laid


class InputMajorLinear(nn.Linear):
    """A frozen linear layer without bias whose weights are multiplied as they lie; else as its base class."""

    _laid: tuple[Tensor, Tensor] | None = None
    """The weight, and a view of it [in, out]."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        weight, laid = self._parameters["weight"], self._laid  # looked up by name, a parameter is slow to find
        if laid is None or laid[0] is not weight:
            laid = self.lay()
        return torch.matmul(input, laid[1])

    def lay(self) -> tuple[Tensor, Tensor]:
        """Take the weights as they now are."""
        weight = self._parameters["weight"]
        self._laid = (weight, weight.t())
        return self._laid

    def __getstate__(self) -> dict[str, Any]:
        # The view would be copied as if it were weights of its own.
        return {name: value for name, value in self.__dict__.items() if name != "_laid"}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "InputMajorLinear":
        self._laid = None
        return super()._apply(fn, recurse)
