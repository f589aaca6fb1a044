"""Modules of a model whose weights stay packed, as a checkpoint has them: they are never held as floats."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.runtime.verifier.layers.linears import InputMajorLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def placeholder(shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor of a weight's shape that holds one number, which is none."""
    return torch.full((), float("nan")).expand(shape)


class PackedLinear(InputMajorLinear):
    """A linear layer that was never anything but packed, and stays so until it leaves the CPU or float32."""

    def unpack(self) -> None:
        """Nothing: there is no other form to go back to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _leaves(fn):
            return self
        super().unpack()
        return super()._apply(fn, recurse)


class PackedRows(nn.Embedding):
    """A table whose rows are unpacked as they are looked up."""

    _panels: GroupPanels | None = None

    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]"""
        if self._panels is None:
            return super().forward(input)
        return self._panels.columns_at(input.flatten()).view(*input.shape, -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if self._panels is None or _leaves(fn):
            return self
        self._parameters["weight"] = nn.Parameter(self._panels.dense(), requires_grad=False)
        self._panels = None
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._panels is not None:
            destination[f"{prefix}weight"] = self._panels.dense()


def _leaves(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of a module's tensors leaves float32 on the CPU what it is."""
    found = fn(torch.empty(0))
    return found.device.type == "cpu" and found.dtype == torch.float32


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
            one.__dict__["_panels"] = panels


def may_be_packed(module: nn.Module | None) -> bool:
    """Whether a module may be one of these."""
    return type(module) is nn.Linear or isinstance(module, nn.Embedding)
