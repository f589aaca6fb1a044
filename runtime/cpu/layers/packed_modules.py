"""Modules of a model whose weights stay packed, as a checkpoint has them: they are never held as floats."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.group_panels import GroupPanels, can_pack
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear
from wingbeat.runtime.verifier.layers.linears import Packable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedLinear(InputMajorLinear):
    """A linear layer that was never anything but packed, and stays so until it leaves the CPU or float32."""

    def unpack(self) -> None:
        """Nothing: there is no other form to go back to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _leaves(fn):
            return self
        super().unpack()
        return super()._apply(fn, recurse)


class Held(Packable):
    """A module whose parameters of some names are packed, until it leaves the CPU or float32."""

    def dense_parameters(self) -> dict[str, Tensor]:
        """The packed ones as numbers, by name; empty where none is packed."""
        return {}

    def unpack(self) -> None:
        """Hold them as numbers again."""
        self._parameters |= _parameters(self.dense_parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _leaves(fn):
            return self
        self.unpack()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # Panels hold addresses.
        state = {name: value for name, value in self.__dict__.items() if name != "panels"}
        return state | {"_parameters": self._parameters | _parameters(self.dense_parameters())}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": weight for name, weight in self.dense_parameters().items()})


def _parameters(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}


class PackedRows(Held, nn.Embedding):
    """A table whose rows are unpacked as they are looked up."""

    panels: GroupPanels | None = None

    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]"""
        if self.panels is None:
            return super().forward(input)
        return self.panels.columns_at(input.flatten()).view(*input.shape, -1)

    def unpack(self) -> None:
        """See `Held.unpack`."""
        super().unpack()
        self.panels = None

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Held.dense_parameters`."""
        return {} if self.panels is None else {"weight": self.panels.dense()}

    def dense_weight(self) -> Tensor:
        """See `Packable.dense_weight`."""
        return super().dense_weight() if self.panels is None else self.panels.dense()

    @property
    def packed(self) -> GroupPanels | None:
        """See `Packable.packed`."""
        return self.panels


class ExpertPanels(NamedTuple):
    """Weights of experts, packed, by expert."""

    gates: tuple[GroupPanels, ...]
    ups: tuple[GroupPanels, ...]
    downs: tuple[GroupPanels, ...]

    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(one.nbytes() for kind in self for one in kind)


class PackedExperts(Held):
    """Experts of transformers whose weights are packed one by one.

    An expert's product takes the rows that were sent to it; a row's sum over its experts has their order, whatever is
    beside it.
    """

    panels: ExpertPanels | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[num_rows, hidden], expert and weight of each of a row's choices [num_rows, k] -> [num_rows, hidden]"""
        if self.panels is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        kernels, out = cpu_kernels(), torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            row, choice = torch.where(top_k_index == expert)
            gate, up, down = (kind[expert] for kind in self.panels)
            rows = hidden_states[row]
            both = torch.cat([kernels.packed_linear(rows, gate), kernels.packed_linear(rows, up)], dim=-1)
            made = kernels.packed_linear(self._apply_gate(both).contiguous(), down)
            out.index_add_(0, row, made * top_k_weights[row, choice, None])
        return out

    def unpack(self) -> None:
        """See `Held.unpack`."""
        super().unpack()
        self.panels = None

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Held.dense_parameters`."""
        if self.panels is None:
            return {}
        gates, ups, downs = (torch.stack([one.dense() for one in kind]) for kind in self.panels)
        return {"gate_up_proj": torch.cat([gates, ups], dim=1), "down_proj": downs}

    @property
    def packed(self) -> ExpertPanels | None:
        """See `Packable.packed`."""
        return self.panels


def _leaves(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of a module's tensors leaves float32 on the CPU what it is."""
    found = fn(torch.empty(0))
    return found.device.type == "cpu" and found.dtype == torch.float32


def pack_weight(module: nn.Module | None, weight: GroupedWeight, bias: Tensor | None) -> GroupPanels | None:
    """See `runtime.parts`.

    Args:
        bias: [columns]
    """
    kernels, may_be = cpu_kernels(), type(module) is nn.Linear or isinstance(module, nn.Embedding)
    if kernels is None or not may_be or not can_pack(weight):
        return None
    return kernels.pack_groups(weight, None if bias is None else bias.float())


def pack_experts(num_experts: int, read: Callable[[str, int], GroupedWeight]) -> ExpertPanels | None:
    """See `runtime.parts`."""
    kernels, found = cpu_kernels(), []
    if kernels is None:
        return None
    for kind in ("gate", "up", "down"):
        if not can_pack(read(kind, 0)):
            return None
        found.append(tuple(kernels.pack_groups(read(kind, expert)) for expert in range(num_experts)))
    return ExpertPanels(*found)


def keep_packed(model: "PreTrainedModel", packed: "Mapping[str, GroupPanels | ExpertPanels]") -> None:
    """Let linear layers, tables and experts multiply and look up by panels.

    Args:
        packed: by the name of the weight, of experts by that of their module; an embedding's is that of its output
            matrix as well where these are tied.
    """
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    for name, panels in packed.items():
        module = modules[name.removesuffix(".weight")]
        both = (head, embedding) if is_tied and module in (head, embedding) else (module,)
        for one in both:
            kind = type(one)
            if isinstance(panels, ExpertPanels):
                one.__class__ = type(kind.__name__, (PackedExperts, kind), {})
            elif isinstance(one, nn.Embedding):
                one.__class__ = PackedRows if kind is nn.Embedding else type(kind.__name__, (kind, PackedRows), {})
            else:
                one.__class__ = PackedLinear
            one.__dict__["panels"] = panels
