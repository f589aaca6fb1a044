"""Runs a half-precision model's arithmetic in float32 without a second whole model in memory.

`in_float32` widens weights temporarily, one decoder layer at a time. `exact_copy` builds a separate float32 model, with
only the first layers if all layers would need too much memory.
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
"""Maximum size, in bytes, of a float32 copy that has all layers of a model; larger models are copied in part."""


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which a model computes in float32. Only one decoder layer's weights are float32 at a time.

    Weights outside the decoder layers are float32 until the context ends.
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
    """Returns a float32 copy of a model, and the copy's number of layers.

    Args:
        attention: attention parameters of each layer, as probed.
    """
    layers = _layers_of(model)
    # Vectors are not counted, because ranks of a tensor-parallel model must compute the same size but may hold
    # different vectors.
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
    """Returns a float32 copy of a tensor; the copy of a packed weight's placeholder is again one number, expanded to
    the weight's shape."""
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        return tensor.data[(0,) * tensor.ndim].float().expand(tensor.shape)
    return tensor.data.to(torch.float32, copy=True) if tensor.dtype in HALVES else tensor.data.clone()


def _cut_config(model: PreTrainedModel, num_layers: int, count: int) -> None:
    """Makes the config of a model with `num_layers` layers describe only the model's first `count` layers."""
    config = model.config.get_text_config()
    config.num_hidden_layers = count
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, value[:count])


def _with_every_kind(layers: nn.ModuleList, attention: list[LayerAttention]) -> int:
    """Returns the smallest number of leading layers that include every kind of layer."""
    kinds = [
        (type(layer), kind, tuple((name, weight.shape) for name, weight in layer.named_parameters()))
        for layer, kind in zip(layers, attention, strict=True)
    ]
    return 1 + max(kinds.index(kind) for kind in kinds)


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return decoder_layers(model, model.config.get_text_config().num_hidden_layers)


def _halves(module: nn.Module) -> list[Tensor]:
    """Returns the half-precision parameters and buffers of a module, without duplicates."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in HALVES]
