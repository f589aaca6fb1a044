"""Determines each layer's attention parameters with a recording attention function, in one pass over a few tokens.

The pass's logits are not used; correctness is checked by the test at load time
(`wingbeat.runtime.model_trial.trial`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from wingbeat.kernels.attention.reference import masked_attention
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.verifier.layers.attention import WINDOW_ATTRIBUTE
from wingbeat.runtime.verifier.layers.mask_shape import MaskFunction, MaskShape, for_text, mask_shape
from wingbeat.runtime.verifier_errors import UnsupportedModelError

PROBE_NAME = "wingbeat_probe"
MASKED_PROBE_NAME = "wingbeat_masked_probe"
"""Second name of the recording attention function, for which transformers builds masks."""
PROBE_KEYWORD = "wingbeat_recorder"

_NUM_TOKENS = 9
_POSITIONS = ("position_ids", "cache_position")
"""Keywords of attention functions that describe rows and no attention."""


@dataclass
class Recorder:
    """Arguments that the recording attention function received, by layer index."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    num_calls: dict[int, int] = field(default_factory=dict)
    num_keys: dict[int, int] = field(default_factory=dict)
    num_unnumbered: int = 0
    """Number of calls by modules without a layer index."""


class ProbedAttention(NamedTuple):
    """Attention parameters of every layer."""

    layers: list[LayerAttention]
    max_positions: int
    """Number of positions within which `layers` describes the attention of all layers."""


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    recorder: Recorder | None = kwargs.get(PROBE_KEYWORD)
    if recorder is None:
        raise UnsupportedModelError(
            "its layers do not pass the keywords of its forward on: an attention function cannot be told of the batch"
        )
    layer = getattr(module, "layer_idx", None)
    unread = sorted(name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _POSITIONS)
    if unread:
        raise UnsupportedModelError(
            f"layer {layer} gives attention {', '.join(unread)}, which our function does not read"
        )
    if layer is None:
        recorder.num_unnumbered += 1
    else:
        recorder.layers[layer] = LayerAttention(
            query.shape[1], key.shape[1], key.shape[3], value.shape[3], sliding_window
        )
        recorder.modules[layer], recorder.masks[layer] = module, attention_mask
        recorder.num_keys[layer] = key.shape[2]
        recorder.num_calls[layer] = recorder.num_calls.get(layer, 0) + 1
    shape = query.shape[2], key.shape[2]
    mask = torch.full(shape, torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
    out = masked_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask.triu(1)[None],
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
        s_aux,
    )
    return out.contiguous(), None


class _MaskMaker:
    """Builds transformers' eager masks, and stores the mask function from which each mask was built."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, MaskFunction]] = []

    def __call__(self, *args: Any, mask_function: MaskFunction, **kwargs: Any) -> Tensor | None:
        mask = eager_mask(*args, mask_function=mask_function, **kwargs)
        if mask is not None:
            self.made.append((mask, mask_function))
        return mask

    def function_of(self, mask: Tensor) -> MaskFunction | None:
        """Returns the mask function from which a mask was built; the mask may be a view of the built mask.

        Returns None if the mask was not built here.
        """
        place = mask.untyped_storage().data_ptr()
        return next((made_by for made, made_by in self.made if made.untyped_storage().data_ptr() == place), None)


_mask_maker = _MaskMaker()

AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionInterface.register(MASKED_PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(MASKED_PROBE_NAME, _mask_maker)


@torch.inference_mode()
def probe_attention(
    model: PreTrainedModel, num_positions: int, without: frozenset[int] = frozenset()
) -> ProbedAttention:
    """Runs a few tokens through a recording attention function.

    Windows that are found in masks are stored on the modules.

    Args:
        num_positions: length of the longest possible sequence; a window of at least that length hides no key.
        without: indices of layers for which transformers' cache holds no keys and values.

    Raises:
        UnsupportedModelError: a layer needs something that the runtime's attention function lacks; the message does not
            contain the model's name.
    """
    recorder = Recorder()
    device = next(model.parameters()).device
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    _mask_maker.made.clear()
    try:
        model.set_attn_implementation(MASKED_PROBE_NAME)
        model(input_ids=positions + 1, position_ids=positions, use_cache=False, **{PROBE_KEYWORD: recorder})
        num_layers = model.config.get_text_config().num_hidden_layers
        # Layers that reuse other layers' keys and values have none in transformers' cache, but have keys and values in
        # the runtime's cache.
        attending = [layer for layer in range(num_layers) if layer not in without or layer in recorder.layers]
        _check_calls(recorder, num_layers, attending)
        # Results are kept by mask function, because layers share mask functions and evaluating a long mask takes long.
        shape_of = cache(lambda made_by: mask_shape(for_text(made_by, _NUM_TOKENS, device), num_positions, device))
        shapes = {layer: _shape(recorder.masks[layer], layer, shape_of) for layer in attending}
    finally:
        _mask_maker.made.clear()
    layers, limits = [_NO_ATTENTION] * num_layers, [num_positions]
    for index, shape in shapes.items():
        seen = recorder.layers[index]
        setattr(recorder.modules[index], WINDOW_ATTRIBUTE, shape.window)
        layers[index] = LayerAttention(*[getattr(seen, n) for n in _WIDTHS], shape.window)
        limits += [] if shape.causal_until is None else [shape.causal_until]
    return ProbedAttention(layers, min(limits))


_NO_ATTENTION = LayerAttention(0, 0, 0, 0, None)
_WIDTHS = ("num_heads", "num_kv_heads", "key_dim", "value_dim")


def _check_calls(recorder: Recorder, num_layers: int, attending: list[int]) -> None:
    if recorder.num_unnumbered:
        raise UnsupportedModelError(
            "its attention modules have no layer_idx, so that their keys and values cannot be told apart"
        )
    missing = sorted(set(attending) - recorder.layers.keys())
    if missing:
        raise UnsupportedModelError(
            f"{_named(missing, num_layers)} never call transformers' attention interface: text skips them, or they "
            "have code of their own, which does not read a paged cache"
        )
    unknown = sorted(recorder.layers.keys() - set(range(num_layers)))
    if unknown:
        raise UnsupportedModelError(f"attention is called for layers {unknown}, but its config counts {num_layers}")
    foreign = {layer: count for layer, count in recorder.num_keys.items() if count != _NUM_TOKENS}
    if foreign:
        layer, count = min(foreign.items())
        raise UnsupportedModelError(
            f"layer {layer} attends to {count} keys where {_NUM_TOKENS} tokens are: a paged cache holds one per token"
        )
    repeated = {layer: count for layer, count in recorder.num_calls.items() if count != 1}
    if repeated:
        layer, count = min(repeated.items())
        raise UnsupportedModelError(
            f"layer {layer} calls attention {count} times per pass: a paged cache holds one key and value per layer "
            "and position"
        )


def _shape(mask: Tensor | None, layer: int, shape_of: Callable[[MaskFunction], MaskShape | None]) -> MaskShape:
    if mask is None:
        raise UnsupportedModelError(f"layer {layer} attends without a mask, to later tokens too: it is not causal")
    function = _mask_maker.function_of(mask)
    if function is None:
        raise UnsupportedModelError(f"layer {layer} attends under a mask that the model makes by itself")
    shape = shape_of(function)
    if shape is None:
        raise UnsupportedModelError(f"layer {layer} attends to later tokens: it is not causal")
    return shape


def _named(layers: list[int], num_layers: int) -> str:
    return "its layers" if len(layers) == num_layers else f"layers {layers}"
