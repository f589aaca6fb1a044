"""A model's arithmetic in float32, by the weights that it holds in half precision, without a second whole model.

`in_float32` widens weights for a while, one decoder layer after the other. `exact_copy` is a model of its own in
float32, of the first layers where all of them would take too much memory.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.verifier.layers.loaded_model import decoder_layers

HALVES = (torch.bfloat16, torch.float16)
WHOLE_COPY_BYTES = 4 << 30
"""Largest copy in float32 that has all layers of a model."""


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which a model's passes compute in float32; one decoder layer's weights are wide at a time.

    Weights outside of the decoder's layers are wide until the context ends.
    """
    layers = _layers_of(model)
    held: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
    inside = {id(tensor) for tensor in _halves(layers)}

    def widen(owner: nn.Module, *given: object) -> None:
        tensors = [tensor for tensor in _halves(owner) if owner is not model or id(tensor) not in inside]
        held[owner] = [(tensor, tensor.data) for tensor in tensors]
        for tensor in tensors:
            tensor.data = _widened(tensor)

    def narrow(owner: nn.Module, *given: object) -> None:
        for tensor, data in held.pop(owner, []):
            tensor.data = data

    hooks: list[Any] = []
    try:
        for layer in layers:
            hooks += [layer.register_forward_pre_hook(widen), layer.register_forward_hook(narrow)]
        widen(model)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for owner in list(held):
            narrow(owner)


def exact_copy(model: PreTrainedModel, attention: list[LayerAttention]) -> tuple[PreTrainedModel, int]:
    """A model in float32 with the same weights, and how many layers of it: all, or the first ones of every kind.

    Args:
        attention: of each layer, as it was probed.
    """
    layers = _layers_of(model)
    # Vectors do not count: the ranks of a divided model, which must agree, may have fewer of them.
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    count = len(layers) if num_bytes <= WHOLE_COPY_BYTES else _with_every_kind(layers, attention)
    whole = dict(layers._modules)
    try:
        for index in range(count, len(layers)):
            del layers._modules[str(index)]
        wide = {id(one): nn.Parameter(_widened(one), requires_grad=False) for one in model.parameters()}
        wide |= {id(one): _widened(one) for one in model.buffers()}
        made = copy.deepcopy(model, wide)
    finally:
        layers._modules.clear()
        layers._modules.update(whole)
    if count < len(whole):
        _cut_config(made, len(whole), count)
    return made, count


def _widened(tensor: Tensor) -> Tensor:
    """A copy in float32; the place of a packed weight stays one number."""
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        return tensor.data[(0,) * tensor.ndim].float().expand(tensor.shape)
    return tensor.data.to(torch.float32, copy=True) if tensor.dtype in HALVES else tensor.data.clone()


def _cut_config(model: PreTrainedModel, num_layers: int, count: int) -> None:
    """Let a config describe the first layers alone."""
    config = model.config.get_text_config()
    config.num_hidden_layers = count
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, value[:count])


def _with_every_kind(layers: nn.ModuleList, attention: list[LayerAttention]) -> int:
    """Number of first layers among which every kind of layer is."""
    kinds = [
        (type(layer), kind, tuple((name, weight.shape) for name, weight in layer.named_parameters()))
        for layer, kind in zip(layers, attention, strict=True)
    ]
    return 1 + max(kinds.index(kind) for kind in kinds)


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return decoder_layers(model, model.config.get_text_config().num_hidden_layers)


def _halves(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers in half precision, each once."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in HALVES]
