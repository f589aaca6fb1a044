"""Modules of a model whose weights stay packed, as a checkpoint has them: they are never held as floats."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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


class PackedRows(Packable, nn.Embedding):
    """A table whose rows are unpacked as they are looked up."""

    panels: GroupPanels | None = None

    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]"""
        if self.panels is None:
            return super().forward(input)
        return self.panels.columns_at(input.flatten()).view(*input.shape, -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _leaves(fn):
            return self
        if self.panels is not None:
            self._parameters["weight"] = nn.Parameter(self.panels.dense(), requires_grad=False)
            self.panels = None
        return super()._apply(fn, recurse)

    def dense_weight(self) -> Tensor:
        """See `Packable.dense_weight`."""
        return super().dense_weight() if self.panels is None else self.panels.dense()

    @property
    def packed(self) -> GroupPanels | None:
        """See `Packable.packed`."""
        return self.panels

    def __getstate__(self) -> dict[str, Any]:
        # Panels hold addresses.
        state = {name: value for name, value in self.__dict__.items() if name != "panels"}
        if self.panels is not None:
            weight = nn.Parameter(self.panels.dense(), requires_grad=False)
            state["_parameters"] = self._parameters | {"weight": weight}
        return state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.panels is not None:
            destination[f"{prefix}weight"] = self.panels.dense()


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


def keep_packed(model: "PreTrainedModel", packed: Mapping[str, GroupPanels]) -> None:
    """Let linear layers and tables multiply and look up by panels.

    Args:
        packed: by the name of the weight; that of an embedding is its output matrix's as well where these are tied.
    """
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    for name, panels in packed.items():
        module = modules[name.removesuffix(".weight")]
        both = (head, embedding) if is_tied and module in (head, embedding) else (module,)
        for one in both:
            kind = type(one)
            if isinstance(one, nn.Embedding):
                one.__class__ = PackedRows if kind is nn.Embedding else type(kind.__name__, (kind, PackedRows), {})
            else:
                one.__class__ = PackedLinear
            one.__dict__["panels"] = panels
