"""Replaces a loaded verifier's layers, norms and output head with versions that run on C++ kernels."""

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels, norm_rows
from wingbeat.runtime.cpu.layers.eight_bits import pack_rounded
from wingbeat.runtime.cpu.layers.layer_stack import GATES, GEMMA_LAYERS, CpuLayer, LayerStack, cpu_class
from wingbeat.runtime.cpu.layers.packed_linears import pack_linear
from wingbeat.runtime.cpu.layers.packed_modules import PackedRows
from wingbeat.runtime.cpu.layers.stacked_model import join_model
from wingbeat.runtime.fused.layers import KNOWN_LAYERS, LayerOps, Swap
from wingbeat.runtime.kv.pool import LayerAttention


class StackSwap(Swap):
    """Swaps a model's layers into one `LayerStack`."""

    ops = LayerOps(add_rms_norm=norm_rows)
    known = KNOWN_LAYERS | GEMMA_LAYERS
    gates = frozenset(GATES)

    def __init__(self, kernels: CpuKernels) -> None:
        self._stack = LayerStack(kernels)

    def swap(self, layer: nn.Module, attention: LayerAttention, is_whole: bool = True) -> None:
        """See `Swap.swap`."""
        self._stack.add(layer, attention)
        layer.__class__ = cpu_class(type(layer))
        layer.__dict__["_stack"] = self._stack

    def take_back(self, layer: nn.Module, kind: type[nn.Module], attention: type[nn.Module]) -> None:
        """See `Swap.take_back`."""
        layer.leave_stack()
        super().take_back(layer, kind, attention)


def swap_layers(parameter: Tensor, deterministic: bool) -> StackSwap | None:
    """Returns the `StackSwap` for layers of this parameter's device and dtype; None if such layers are not swapped.

    Args:
        deterministic: swap layers of any dtype.
    """
    ours = parameter.device.type == "cpu" and (deterministic or parameter.dtype in (torch.float32, torch.bfloat16))
    kernels = cpu_kernels() if ours else None
    return None if kernels is None else StackSwap(kernels)


def finish_layers(model: nn.Module, layers: nn.ModuleList) -> None:
    """Makes the swapped layers run as one step, and packs the output head and all rounded layers that are not packed
    yet.
    """
    if any(isinstance(layer, CpuLayer) for layer in layers):
        _pack_output(model)
        join_model(model, layers)
    pack_rounded(model)


def _pack_output(model: nn.Module) -> None:
    """Packs an output head. If the head was tied to the embedding, the embedding then keeps its own copy of the
    table.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(embedding, "weight", None) is head.weight and not isinstance(embedding, PackedRows)
    if pack_linear(head, cpu_kernels()) and tied:
        # The tied weight was stored input-major. In the copy each token's row is contiguous again.
        embedding.weight.data = embedding.weight.data.contiguous()
