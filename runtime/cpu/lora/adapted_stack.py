"""Adds LoRA adapters to stacked layers, and to single linear layers on the CPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.ops import Addition, CpuKernels, cpu_kernels
from wingbeat.kernels.lora.adapters import add_adapters
from wingbeat.kernels.lora.native import adapt, adapters_of, addition_of
from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters
from wingbeat.runtime.cpu.layers.layer_stack import Additions, CpuLayer
from wingbeat.runtime.round.rows import Rows


def adapt_layer(layer: nn.Module, stacks: tuple[StackedAdapters, ...]) -> None:
    """Makes a layer that runs in a stack add the adapters to its matrix products."""
    if isinstance(layer, CpuLayer) and layer.stack is not None:
        held: list[object] = [tensor for stack in stacks for tensor in stack[:3]]
        layer.stack.add_to(layer.self_attn.layer_idx, tuple(map(adapters_of, stacks)), held)
        layer.stack.additions = Additions(_knows_runs, partial(_of_rows, layer.stack.kernels))


def _knows_runs(rows: Rows) -> bool:
    """Whether the host has the rows of each adapter as contiguous ranges, which the kernels require."""
    adapted = rows.columns.get(AdapterRows)
    return adapted is None or adapted.runs is not None


def _of_rows(kernels: CpuKernels, rows: Rows) -> Addition | None:
    adapted = rows.columns.get(AdapterRows)
    return None if adapted is None else addition_of(kernels, adapted)


def adapt_product(linear: nn.Linear) -> Callable[..., Tensor] | None:
    """Returns a function that adds adapters to a linear layer's output with C++ kernels; None if torch operations must
    add them.
    """
    weight = linear.weight
    ours = weight.device.type == "cpu" and (weight.dtype == torch.float32 or getattr(linear, "deterministic", False))
    return _add_by_kernels if ours else None


def _add_by_kernels(out: Tensor, x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> Tensor:
    """Computes the same as `add_adapters`, with C++ kernels if they support these rows."""
    kernels = cpu_kernels()
    if kernels is None or rows.runs is None or not x.is_contiguous() or len(x) != len(rows.ids):
        return add_adapters(out, x, adapters, rows)
    adapt(kernels, out, x, adapters, rows)
    return out
