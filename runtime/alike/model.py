"""Requirements of deterministic mode on GPUs, in which the bits of a row's result do not depend on the other rows in
the same pass.

The order of summation in matrix products and attention depends neither on other rows nor on a tree's shape. Norms and
RoPE are computed row by row, and all other operations elementwise. For a model with any other module, an error is
raised that names the module.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.kernels import choice
from wingbeat.kernels.attention.reference import MAX_HEAD_DIM
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.fused.attention import FusedAttention
from wingbeat.runtime.fused.layers import FusedLayer, FusedNorm, name_of
from wingbeat.runtime.fused.outside import check_outside
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_in_blocks
from wingbeat.runtime.verifier.layers.linears import PackableLinear
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE
from wingbeat.runtime.verifier_errors import UnsupportedModelError

_NEEDED = ("attention", "alike_product", "add_rms_norm", "rotate_and_store", "silu_mul", "choose_tokens")
_MOST_NODES, _MOST_KEYS = 64, 1 << 18
_COUNTS, _ROWS = (1, 20, 40, 64), 80
"""Numbers of rows with which matrix products are compared. Each of the four small numbers uses another tile height of
the program for few rows; 80 exceeds that program's limit.
"""
_BY_ELEMENTS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in {"gemma2": "Gemma2", "gemma3": "Gemma3", "granite": "Granite"}.items()
)
"""Class names of layers in which elements are summed only in attention, norms and linear layers."""


def check(model: PreTrainedModel) -> None:
    """Raises an error if this process lacks a kernel that deterministic mode needs.

    Raises:
        UnsupportedModelError: a kernel is missing; the message does not contain the model's name.
    """
    missing = [name for name in _NEEDED if choice.module_of(name) is None]
    if missing:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and there is no kernel {missing[0]} on this device")


def check_limits(config: EngineConfig) -> None:
    """Raises an error for limits that deterministic attention does not support.

    Raises:
        ValueError: the message is one line with field and value.
    """
    shape, num_keys = config.speculation, config.max_blocks_per_seq * config.block_size
    if shape.num_nodes > _MOST_NODES and shape.draft_top_k != 1:
        raise ValueError(f"{ASKED_ALIKE} and verify_tree_size is {shape.num_nodes}: use {_MOST_NODES} at most on GPUs")
    if num_keys > _MOST_KEYS:
        raise ValueError(
            f"{ASKED_ALIKE} and max_model_len is {config.max_model_len}: use less than {_MOST_KEYS} on GPUs"
        )


def make(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Checks that all modules run on deterministic kernels, and tests the matrix products on this device.

    Args:
        layers: the decoder's layers, which already run on Wingbeat's kernels where possible.

    Raises:
        UnsupportedModelError: a module is not deterministic; the message does not contain the model's name.
    """
    for layer in layers:
        kind, attention = type(layer), getattr(layer, "self_attn", None)
        known = not _BY_ELEMENTS.isdisjoint(map(name_of, kind.__mro__))
        by_elements = known and isinstance(attention, FusedAttention)
        if not isinstance(layer, FusedLayer) and not by_elements:
            raise UnsupportedModelError(
                f"{ASKED_ALIKE}, but its layers ({kind.__name__}) do not run on wingbeat's kernels"
            )
        if attention.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(f"{ASKED_ALIKE}, and its heads have {attention.head_dim} elements")
        for name, module in layer.named_modules():
            if not is_alike(module) and list(module.parameters(recurse=False)):
                raise UnsupportedModelError(
                    f"{ASKED_ALIKE}, but its {name} ({type(module).__name__}) does not run on wingbeat's kernels"
                )
    check_outside(model, layers, is_alike)
    try_products(model)


def is_alike(module: nn.Module) -> bool:
    """Whether the bits of a module's output for a row do not depend on the other rows."""
    return isinstance(module, FusedNorm) or getattr(module, "alike", False)


@torch.inference_mode()
def try_products(model: nn.Module) -> None:
    """Compares the bits of matrix products with few rows and with many rows, for each weight shape.

    Raises:
        UnsupportedModelError: the bits differ; the message does not contain the model's name.
    """
    linears = [one for one in model.modules() if isinstance(one, PackableLinear) and one.alike]
    for linear in {one.weight.shape: one for one in linears}.values():
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_ROWS, linear.in_features, generator=generator).to(linear.weight.device, linear.weight.dtype)
        many = linear.product(rows)
        for count in _COUNTS:
            if not torch.equal(linear.product(rows[-count:].contiguous()), many[-count:]):
                shape = f"{linear.in_features} by {linear.out_features}"
                raise UnsupportedModelError(f"{ASKED_ALIKE}, and a product of {shape} depends on the rows beside here")


class AlikeSegments(NamedTuple):
    """Segments of a batch in the form that deterministic attention reads."""

    segments: list[Segment]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: float, **options: Any) -> Tensor:
        """See `wingbeat.runtime.round.rows.PackedSegments`."""
        return attend_in_blocks(query, key_cache, value_cache, self.segments, scaling, alike=True, **options)


def pack_segments(segments: list[Segment], dtype: torch.dtype) -> AlikeSegments:
    """See the hook in `runtime.parts`."""
    return AlikeSegments(segments)
