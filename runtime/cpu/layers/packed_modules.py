"""Modules whose weights stay packed as in the checkpoint, and are not stored as floats."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels.cpu.group_panels import GroupPanels, can_pack
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear
from wingbeat.runtime.verifier.layers.linears import PackedParameters, packed_class

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place


class PackedLinear(InputMajorLinear):
    """A linear layer loaded in packed form. Its weight stays packed until the layer is moved from the CPU or converted
    from float32.
    """

    def unpack(self) -> None:
        """Does nothing, because the packed form is the only form in which the weights exist."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _leaves(fn):
            return self
        super().unpack()
        return super()._apply(fn, recurse)


class Held(PackedParameters):
    """A module that keeps some parameters packed until the module is moved from the CPU or converted from float32."""

    panels: Any = None
    """The packed parameters; None if no parameter is packed."""

    def unpack(self) -> None:
        """Stores the packed parameters as floats again."""
        self._parameters |= _parameters(self.dense_parameters())
        self.panels = None

    @property
    def packed(self) -> Any:
        """See `Packable.packed`."""
        return self.panels

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _leaves(fn):
            return self
        self.unpack()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # A copy omits the panels, because they contain addresses.
        state = {name: value for name, value in self.__dict__.items() if name != "panels"}
        return state | {"_parameters": self._parameters | _parameters(self.dense_parameters())}


def _parameters(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}


class PackedRows(Held, nn.Embedding):
    """An embedding whose rows are unpacked when they are looked up."""

    panels: GroupPanels | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Looks up [...] -> [..., embedding_dim]."""
        if self.panels is None:
            return super().forward(input)
        return self.panels.columns_at(input.flatten()).view(*input.shape, -1)

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Held.dense_parameters`."""
        return {} if self.panels is None else {"weight": self.panels.dense()}

    def dense_weight(self) -> Tensor:
        """See `Packable.dense_weight`."""
        return super().dense_weight() if self.panels is None else self.panels.dense()


class ExpertPanels(NamedTuple):
    """Packed weights of a layer's experts; each tuple has one entry per expert."""

    gated: tuple[tuple[GroupPanels, ...], ...]
    """Panels of the gate and up projections: two tuples, or one tuple if both projections of an expert are joined."""
    downs: tuple[GroupPanels, ...]

    @property
    def all(self) -> Iterator[GroupPanels]:
        """Panels of all experts."""
        return chain(*self.gated, self.downs)

    def nbytes(self) -> int:
        """Size of all panels in bytes."""
        return sum(one.nbytes() for one in self.all)


class PackedExperts(Held):
    """transformers' experts with each expert's weights packed.

    Each expert computes only the rows that are routed to it. A row's sum over its experts has a fixed order that does
    not depend on other rows.
    """

    panels: ExpertPanels | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of the chosen experts' outputs: rows [num_rows, hidden], experts and weights
        [num_rows, k] -> [num_rows, hidden].
        """
        if self.panels is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            row, choice = torch.where(top_k_index == expert)
            gated = _multiply(hidden_states[row], self.panels.gated[expert])
            made = _multiply(self._apply_gate(gated), self.panels.downs[expert : expert + 1])
            out.index_add_(0, row, made * top_k_weights[row, choice, None])
        return out

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Held.dense_parameters`."""
        if self.panels is None:
            return {}
        gated = torch.stack([torch.cat([one.dense() for one in both]) for both in self.panels.gated])
        found = {"gate_up_proj": gated, "down_proj": torch.stack([one.dense() for one in self.panels.downs])}
        return {name: weight.mT.contiguous() if self.is_transposed else weight for name, weight in found.items()}


def _multiply(rows: Tensor, panels: Sequence[GroupPanels]) -> Tensor:
    """Multiplies rows [num_rows, inputs] by several weights, and returns the concatenated outputs."""
    kernels = None if torch.is_grad_enabled() else cpu_kernels()
    if kernels is None:
        return torch.cat([functional.linear(rows, one.dense(), one.bias) for one in panels], dim=-1)
    return kernels.packed_linears(rows.contiguous(), panels)


def _leaves(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` maps a float32 tensor on the CPU to a float32 tensor on the CPU."""
    found = fn(torch.empty(0))
    return found.device.type == "cpu" and found.dtype == torch.float32


def pack_weight(
    module: nn.Module | None, weight: GroupedWeight, bias: Tensor | None, place: "Place"
) -> GroupPanels | None:
    """See `runtime.parts`.

    Args:
        bias: float [columns]: bias of the layer; None if the layer has none.
    """
    kernels, may_be = _kernels_of(place), type(module) is nn.Linear or isinstance(module, nn.Embedding)
    if kernels is None or not may_be or not can_pack(weight):
        return None
    return kernels.pack_groups(weight, None if bias is None else bias.float())


def pack_experts(
    count: int, gated: Sequence[str], read: Callable[[str, int], tuple[GroupedWeight, Tensor | None]], place: "Place"
) -> ExpertPanels | None:
    """See `runtime.parts`."""
    kernels = _kernels_of(place)
    if kernels is None or not all(can_pack(read(kind, 0)[0]) for kind in (*gated, "down")):
        return None

    def made(kind: str, expert: int) -> GroupPanels:
        weight, bias = read(kind, expert)
        return kernels.pack_groups(weight, None if bias is None else bias.float())

    experts = range(count)
    of_gated = tuple(tuple(made(kind, expert) for kind in gated) for expert in experts)
    return ExpertPanels(of_gated, tuple(made("down", expert) for expert in experts))


def _kernels_of(place: "Place") -> CpuKernels | None:
    """Returns the kernels that multiply by packed weights on a device and dtype; None if there are none."""
    return cpu_kernels() if place.device.type == "cpu" and place.dtype == torch.float32 else None


def keep_packed(module: nn.Module, held: Any) -> bool | None:
    """See `runtime.parts`."""
    if not isinstance(held, GroupPanels | ExpertPanels):
        return None
    kind = type(module)
    if isinstance(held, ExpertPanels):
        module.__class__ = packed_class(kind, PackedExperts)
    elif isinstance(module, nn.Embedding):
        module.__class__ = PackedRows if kind is nn.Embedding else type(kind.__name__, (kind, PackedRows), {})
    else:
        module.__class__ = PackedLinear
    module.__dict__["panels"] = held
    return True
