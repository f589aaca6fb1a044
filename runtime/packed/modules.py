"""Modules on a GPU whose weights stay packed; their matrix products run on the kernels of `wingbeat.kernels.packed`."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.experts.product import Routes
from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.kernels.packed.experts import experts_product
from wingbeat.kernels.packed.matrix import (
    PackedMatrix,
    fits_step_layout,
    layout_of,
    packed_product,
    side_by_side,
    to_step_layout,
    unpack,
)
from wingbeat.kernels.packed.rounding import why_not_rounded, write_rounded
from wingbeat.runtime.verifier.layers.linears import PackedParameters, RowsLinear, packed_class, product

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

DEVICES = {"cuda"}
"""Types of devices for which there are kernels for packed weights."""


class ExpertMatrices(NamedTuple):
    """Packed weights of all experts."""

    count: int
    gated: PackedMatrix
    """Columns of the gate and up projections of the first expert, then those of the next expert, and so on."""
    down: PackedMatrix
    gated_bias: Tensor | None
    """Bias [columns] of the gate and up projections; None if there is no bias."""
    down_bias: Tensor | None

    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return self.gated.nbytes() + self.down.nbytes()

    def to(self, device: torch.device) -> "ExpertMatrices":
        """Returns a copy on a device, or this object if it is already there."""
        if self.down.values.device == device:
            return self
        return ExpertMatrices(self.count, *(None if part is None else part.to(device) for part in self[1:]))


class Holder(PackedParameters, nn.Module):
    """A module with packed parameters. Its plain parameters are placeholders with the right shape, dtype and device,
    whose values are NaN.
    """

    packed_names: tuple[str, ...]
    held: PackedMatrix | ExpertMatrices

    @property
    def packed(self) -> PackedMatrix | ExpertMatrices:
        """See `Packable.packed`."""
        return self.held

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # The placeholders are removed before the move, because moving an expanded tensor would allocate its full size.
        places = {name: self._parameters.pop(name) for name in self.packed_names}
        super()._apply(fn, recurse)
        for name, place in places.items():
            one = fn(place.new_full((), float("nan")))
            self._parameters[name] = nn.Parameter(one.expand(place.shape), requires_grad=False)
            self.__dict__["held"] = self.held.to(one.device)
        return self


class WeightHolder(Holder):
    """A module whose `weight` is packed."""

    packed_names = ("weight",)
    held: PackedMatrix

    @property
    def alike(self) -> bool:
        """See `PackableLinear.alike`."""
        return self.held.alike

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Holder.dense_parameters`."""
        return {"weight": self.dense_weight()}

    def dense_weight(self) -> Tensor:
        """See `Packable.dense_weight`."""
        return self.held.dense().to(self.weight.dtype)

    def packed_tensors(self) -> list[Tensor]:
        """See `Packable.packed_tensors`."""
        found: list[Tensor] = []
        self.held.with_each(lambda part: found.append(part) or part)
        return found

    @property
    def why_not_written(self) -> str | None:
        """See `Packable.why_not_written`."""
        return why_not_rounded(self.held)

    def write(self, weight: Tensor) -> None:
        """See `Packable.write`."""
        write_rounded(self.held, weight)

    def save(self) -> list[Tensor]:
        """See `Packable.save`."""
        return [part.to("cpu", copy=True) for part in self.packed_tensors()]

    def restore(self, saved: list[Tensor]) -> None:
        """See `Packable.restore`."""
        for part, value in zip(self.packed_tensors(), saved, strict=True):
            part.copy_(value)


class PackedLinear(WeightHolder, RowsLinear):
    """A linear layer with a packed weight."""

    def product(self, rows: Tensor) -> Tensor:
        """See `PackableLinear.product`."""
        out = self.into
        if out is None:
            out = rows.new_empty(len(rows), self.out_features, dtype=torch.float32 if self.wide else rows.dtype)
        return packed_product(rows, self.held, self.bias, out)

    def add_product(self, total: Tensor, rows: Tensor) -> Tensor:
        """See `PackableLinear.add_product`."""
        return packed_product(rows, self.held, self.bias, total, add=True)


class PackedRows(WeightHolder, nn.Embedding):
    """An embedding whose rows are unpacked when they are looked up."""

    def forward(self, input: Tensor) -> Tensor:
        """Looks up [...] -> [..., embedding_dim]."""
        return unpack(self.held, self.weight.dtype, input.flatten()).view(*input.shape, self.embedding_dim)


class PackedExperts(Holder):
    """transformers' experts with packed weights.

    A row's sum over experts has a fixed order that does not depend on other rows.
    """

    packed_names = ("gate_up_proj", "down_proj")
    held: ExpertMatrices

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of the chosen experts' outputs: rows [num_rows, hidden], experts and weights
        [num_rows, k] -> [num_rows, hidden].
        """
        own, routes = self.held, Routes.of(top_k_index, self.held.count)
        gated = experts_product(hidden_states, own.gated, own.gated_bias, routes)
        made = self._apply_gate(gated).to(hidden_states.dtype)
        each = experts_product(made, own.down, own.down_bias, routes).view(*top_k_index.shape, -1)
        return (each * top_k_weights[:, :, None]).sum(dim=1).to(hidden_states.dtype)

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Holder.dense_parameters`."""
        found = {}
        for name, matrix in zip(self.packed_names, (self.held.gated, self.held.down), strict=True):
            weight = matrix.dense().unflatten(0, (self.held.count, -1)).to(self._parameters[name].dtype)
            found[name] = weight.mT.contiguous() if self.is_transposed else weight
        return found


class JoinedProduct:
    """Computes the concatenated outputs of linear layers with the same input, in as few kernel launches as the layers'
    layouts allow.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.columns, self._parts, begin = sum(one.out_features for one in linears), [], 0
        for _, alike in groupby(linears, lambda one: layout_of(one.held) if isinstance(one, PackedLinear) else one):
            run = list(alike)
            end = begin + sum(one.out_features for one in run)
            self._parts.append((slice(begin, end), *_as_one(run)))
            begin = end

    def __call__(self, rows: Tensor) -> Tensor:
        """Computes [num_rows, inputs] -> [num_rows, columns]."""
        out = rows.new_empty(len(rows), self.columns)
        for columns, weight, bias in self._parts:
            if isinstance(weight, PackedMatrix):
                packed_product(rows, weight, bias, out[:, columns])
            else:
                out[:, columns] = weight(rows)
        return out


def _as_one(linears: list[nn.Linear]) -> tuple[PackedMatrix | Callable[[Tensor], Tensor], Tensor | None]:
    """Joins linear layers of equal layout into one weight and one bias. For a layer that is not packed, returns a
    function instead of a weight.

    The weights and biases of the joined layers become views of the joined weight and bias.
    """
    first = linears[0]
    if not isinstance(first, PackedLinear):
        return partial(product, first), None
    if len(linears) == 1:
        return first.held, None if first.bias is None else first.bias.data
    bias = None if first.bias is None else torch.cat([one.bias.data for one in linears])
    matrix, begin = side_by_side([one.held for one in linears]), 0
    for one in linears:
        columns = slice(begin, begin + one.out_features)
        one.__dict__["held"] = matrix.select_columns(columns)
        if bias is not None:
            one.bias.data = bias[columns]
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
    if place.device.type not in DEVICES or not may_be or not fits_step_layout(weight):
        return None
    return to_step_layout(weight.to(place.device))


def pack_experts(
    count: int, gated: Sequence[str], read: Callable[[str, int], tuple[GroupedWeight, Tensor | None]], place: "Place"
) -> ExpertMatrices | None:
    """See `runtime.parts`."""
    if place.device.type not in DEVICES:
        return None
    firsts = [read(kind, 0)[0] for kind in (*gated, "down")]
    if any(not fits_step_layout(one) or one.order is not None for one in firsts):
        return None

    def of_all(kinds: Sequence[str]) -> tuple[PackedMatrix | None, Tensor | None]:
        laid, biases = [], []
        for expert in range(count):
            for kind in kinds:
                weight, bias = read(kind, expert)
                laid.append(to_step_layout(weight.to(place.device)))
                biases += [] if bias is None else [bias.to(place.device).float()]
        return side_by_side(laid), torch.cat(biases) if biases else None

    (gate_up, gate_up_bias), (down, down_bias) = of_all(gated), of_all(("down",))
    return None if gate_up is None or down is None else ExpertMatrices(count, gate_up, down, gate_up_bias, down_bias)


def lay_out_linears(module: nn.Module, deterministic: bool) -> None:
    """See `runtime.parts`."""
    for one in module.modules() if deterministic else ():
        if isinstance(one, WeightHolder):
            one.__dict__["held"] = one.held._replace(alike=True)


def keep_packed(module: nn.Module, held: Any) -> bool | None:
    """See `runtime.parts`."""
    if not isinstance(held, PackedMatrix | ExpertMatrices):
        return None
    kind = type(module)
    if isinstance(held, ExpertMatrices):
        module.__class__ = packed_class(kind, PackedExperts)
    elif not isinstance(module, nn.Embedding):
        module.__class__ = PackedLinear
    else:
        module.__class__ = PackedRows if kind is nn.Embedding else type(kind.__name__, (kind, PackedRows), {})
    module.__dict__["held"] = held
    return True
