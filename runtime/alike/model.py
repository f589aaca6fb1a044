"""A model on a GPU of which each row has the same bits whatever shares its pass: what that needs.

Products and attention sum in orders that neither other rows nor a tree's shape change, norms and rotations go row by
row, and everything else on a row's way is done element by element. A model with anything else is refused by name.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.kernels import choice
from wingbeat.kernels.attention.reference import MAX_HEAD_DIM
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_in_blocks
from wingbeat.runtime.verifier.layers.fused import FusedLayer, FusedNorm, name_of
from wingbeat.runtime.verifier.layers.fused_attention import FusedAttention
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE, check_outside
from wingbeat.runtime.verifier_errors import UnsupportedModelError

_NEEDED = ("attention", "alike_product", "add_rms_norm", "rotate_and_store", "silu_mul", "choose_tokens")
_BY_ELEMENTS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in {"gemma2": "Gemma2", "gemma3": "Gemma3", "granite": "Granite"}.items()
)
"""Layers that have sums in their attention, norms and linear layers alone."""


def check(model: PreTrainedModel) -> None:
    """Refuse a process without the kernels.

    Raises:
        UnsupportedModelError: without the model's name.
    """
    missing = [name for name in _NEEDED if choice.module_of(name) is None]
    if missing:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and there is no kernel {missing[0]} on this device")


def make(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Check that all that runs is known.

    Args:
        layers: of the decoder, swapped as far as they can be.

    Raises:
        UnsupportedModelError: without the model's name.
    """
    for layer in layers:
        kind, attention = type(layer), getattr(layer, "self_attn", None)
        by_elements = name_of(kind) in _BY_ELEMENTS and isinstance(attention, FusedAttention)
        if not isinstance(layer, FusedLayer) and not by_elements:
            raise UnsupportedModelError(f"{ASKED_ALIKE}, and its layers ({kind.__name__}) are not our kernels'")
        if attention.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(f"{ASKED_ALIKE}, and its heads have {attention.head_dim} elements")
        for name, module in layer.named_modules():
            if not is_alike(module) and list(module.parameters(recurse=False)):
                raise UnsupportedModelError(f"{ASKED_ALIKE}, and its {name} ({type(module).__name__}) is not our kernels'")
    check_outside(model, layers, is_alike)


def is_alike(module: nn.Module) -> bool:
    """Whether a module's own weights act on a row as on the same row alone."""
    return isinstance(module, FusedNorm) or getattr(module, "alike", False)


class AlikeSegments(NamedTuple):
    """Segments of a batch whose rows attend alike."""

    segments: list[Segment]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, **options: Any) -> Tensor:
        """See `wingbeat.runtime.round.rows.PackedSegments`."""
        return attend_in_blocks(query, key_cache, value_cache, self.segments, scaling, alike=True, **options)


def pack_segments(segments: list[Segment], dtype: torch.dtype) -> AlikeSegments:
    """As the hook of `runtime.parts`."""
    return AlikeSegments(segments)
