"""Modules of a model on a GPU whose weights stay packed, as `wingbeat.kernels.packed` multiplies by them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.kernels.packed.matrix import PackedMatrix, can_lay, lay, layout_of, packed_product, side_by_side, unpack
from wingbeat.runtime.verifier.layers.linears import Packable, PackableLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

DEVICES = {"cuda"}
"""Types of devices whose kernels multiply by packed weights."""


class Holder(Packable, nn.Module):
    """A module whose weight is packed; its parameter of that name has shape, dtype and device, and is NaN."""

    matrix: PackedMatrix

    @property
    def packed(self) -> PackedMatrix:
        """See `Packable.packed`."""
        return self.matrix

    def dense_weight(self) -> Tensor:
        """See `Packable.dense_weight`."""
        return self.matrix.dense().to(self.weight.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        shape, one = self.weight.shape, fn(self.weight.new_full((), float("nan")))
        del self._parameters["weight"]  # moved as it is, it would be as large as the numbers that it stands for
        super()._apply(fn, recurse)
        self._parameters["weight"] = nn.Parameter(one.expand(shape), requires_grad=False)
        if self.matrix.values.device != one.device:
            self.__dict__["matrix"] = self.matrix.to(one.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dense_weight()


class PackedLinear(Holder, PackableLinear):
    """A linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        rows = input.reshape(-1, self.in_features)
        out = rows.new_empty(len(rows), self.out_features, dtype=torch.float32 if self.wide else rows.dtype)
        return packed_product(rows, self.matrix, self.bias, out).view(*input.shape[:-1], self.out_features)

    def add_product(self, total: Tensor, rows: Tensor) -> Tensor:
        """See `PackableLinear.add_product`."""
        return packed_product(rows, self.matrix, self.bias, total, add=True)


class PackedRows(Holder, nn.Embedding):
    """A table whose rows are unpacked as they are looked up."""

    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]"""
        return unpack(self.matrix, self.weight.dtype, input.flatten()).view(*input.shape, self.embedding_dim)


class JoinedProduct:
    """Products of linear layers of one input side by side, by as few launches as their forms let be."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.columns, self._parts, begin = sum(one.out_features for one in linears), [], 0
        for _, alike in groupby(linears, lambda one: layout_of(one.matrix) if isinstance(one, PackedLinear) else one):
            run = list(alike)
            end = begin + sum(one.out_features for one in run)
            self._parts.append((slice(begin, end), *_as_one(run)))
            begin = end

    def __call__(self, rows: Tensor) -> Tensor:
        """[num_rows, inputs] -> [num_rows, columns]"""
        out = rows.new_empty(len(rows), self.columns)
        for columns, weight, bias in self._parts:
            if isinstance(weight, PackedMatrix):
                packed_product(rows, weight, bias, out[:, columns])
            else:
                out[:, columns] = functional.linear(rows, weight, bias)
        return out


def _as_one(linears: list[nn.Linear]) -> tuple[PackedMatrix | Tensor, Tensor | None]:
    """Weight and bias of linear layers that lie alike; what they hold is part of it then."""
    first = linears[0]
    if not isinstance(first, PackedLinear):
        return first.weight, first.bias
    bias = None if first.bias is None else torch.cat([one.bias.data for one in linears])
    if len(linears) == 1:
        return first.matrix, bias
    matrix, begin = side_by_side([one.matrix for one in linears]), 0
    for one in linears:
        one.__dict__["matrix"] = matrix.of(slice(begin, begin + one.out_features))
        begin += one.out_features
    return matrix, bias


def join_packed(linears: Sequence[nn.Linear]) -> JoinedProduct | None:
    """See `runtime.parts`."""
    return JoinedProduct(linears) if any(isinstance(one, PackedLinear) for one in linears) else None


def pack_weight(
    module: nn.Module | None, weight: GroupedWeight, bias: Tensor | None, place: "Place"
) -> PackedMatrix | None:
    """See `runtime.parts`."""
    may_be = type(module) is nn.Linear or (isinstance(module, nn.Embedding) and weight.order is None)
    if place.device.type not in DEVICES or not may_be or not can_lay(weight):
        return None
    return lay(weight.to(place.device))


def keep_packed(model: "PreTrainedModel", packed: Mapping[str, Any]) -> None:
    """See `runtime.parts`."""
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    for name, matrix in packed.items():
        if not isinstance(matrix, PackedMatrix):
            continue
        module = modules[name.removesuffix(".weight")]
        for one in (head, embedding) if is_tied and module in (head, embedding) else (module,):
            kind = type(one)
            if not isinstance(one, nn.Embedding):
                one.__class__ = PackedLinear
            else:
                one.__class__ = PackedRows if kind is nn.Embedding else type(kind.__name__, (kind, PackedRows), {})
            one.__dict__["matrix"] = matrix
