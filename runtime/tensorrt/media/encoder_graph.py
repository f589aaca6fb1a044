"""The vision or audio encoder as a separate graph: one image, or one window of sound, per pass.

Tensors derived from an image's grid are inputs that the host computes; the encoders in transformers accept them as
arguments.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from wingbeat.runtime.media.audio import FEATURES, window_shape
from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import AUDIO
from wingbeat.runtime.tensorrt.engine_config import EngineEncoder
from wingbeat.runtime.tensorrt.export import export_module
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import TOKENS, GraphShapes, Profile, SizeRange
from wingbeat.runtime.tensorrt.limits import Limits
from wingbeat.runtime.tensorrt.session import ENCODER_STAGES, EngineStage, TensorSpec
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

PIXELS = "pixel_values"
_SEGMENTED = "wingbeat_flash_graph"
"""Name of the attention function. Because the name contains "flash", transformers' encoders call the function once with
the whole image, not once per window.
"""
_PLAIN = "eager"


def encoder_of(loaded: LoadedModel) -> EngineEncoder | None:
    """The encoder's entry in an engine directory's config; None if the model takes neither images nor audio."""
    if loaded.reader is None:
        return None
    family, config = loaded.reader.family, loaded.model.config
    if family.kind == AUDIO:
        shape, (_, mask) = window_shape(config), family.inputs
        num_tokens = family.num_tokens(config, {mask: np.ones((1, shape[1]), dtype=np.int64)})
        return EngineEncoder(shape=shape, mask=mask, num_tokens=num_tokens)
    vision, example = config.vision_config, family.example(config, 2, 2)
    fields: dict[str, Any] = {"num_axes": 3 if family.rotates_in_grids else 0}
    if "image_grid_thw" not in family.inputs:
        fields |= {"shape": example[PIXELS].shape[1:], "num_tokens": family.num_tokens(config, example)}
        return EngineEncoder(**fields)
    tower = loaded.model.model.visual
    if (window := getattr(tower, "window_size", None)) is not None:
        fields |= {"window_size": window, "patch_size": tower.patch_size}
    if (side := getattr(tower, "num_grid_per_side", None)) is not None:
        ways = {"mode": tower.interpolation_mode, "align_corners": tower.interpolation_align_corners}
        fields |= {"interpolation": {"num_grid_per_side": side, **ways}}
    fields["num_deep"] = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return EngineEncoder(shape=example[PIXELS].shape[1:], merge=vision.spatial_merge_size, **fields)


def encoder_shapes(encoder: EngineEncoder, hidden_size: int, dtype: torch.dtype) -> GraphShapes:
    """Shapes of the encoder's graph; the dimension `TOKENS` is free if images are grids of patches."""
    if not encoder.merge:
        output, whole = TensorSpec(dtype, (encoder.num_tokens, hidden_size)), TensorSpec(dtype, (1, *encoder.shape))
        inputs = {PIXELS: whole}
        if encoder.mask is not None:
            inputs = {FEATURES: whole, encoder.mask: TensorSpec(torch.int64, (1, encoder.shape[-1]))}
        return GraphShapes(inputs, {"embeddings": output})
    unit = (TOKENS, encoder.merge**2)
    inputs = {PIXELS: TensorSpec(dtype, (*unit, *encoder.shape)), "position_ids": TensorSpec(torch.int64, (*unit, 2))}
    if encoder.window_size is not None:
        inputs["window_index"] = TensorSpec(torch.int64, (TOKENS,))
        inputs["window_segments"] = TensorSpec(torch.int64, unit)
    if encoder.interpolation is not None:
        inputs["interp_indices"] = TensorSpec(torch.int64, (*unit, encoder.num_taps))
        inputs["interp_weights"] = TensorSpec(torch.float32, (*unit, encoder.num_taps))
    names = ["embeddings", *(f"deep_{layer}" for layer in range(encoder.num_deep))]
    return GraphShapes(inputs, dict.fromkeys(names, TensorSpec(dtype, (TOKENS, hidden_size))))


def encoder_inputs(encoder: EngineEncoder, arrays: Mapping[str, Tensor], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Graph inputs of an image or sound, one entry per pass of the graph. An image that is a grid of patches takes one
    pass; an image that is split into crops takes one pass per crop, and a sound one per window.

    Args:
        encoder: config of the encoder.
        arrays: output of the processor.
        dtype: dtype of the pixels or spectrograms.
    """
    if encoder.mask is not None:
        windows = zip(arrays[FEATURES].to(dtype).split(1), arrays[encoder.mask].long().split(1), strict=True)
        return [{FEATURES: window, encoder.mask: mask} for window, mask in windows]
    pixels = arrays[PIXELS].to(dtype)
    if not encoder.merge:
        return [{PIXELS: crop} for crop in pixels.split(1)]
    grid, unit = arrays["image_grid_thw"], encoder.merge**2
    found = {PIXELS: pixels, "position_ids": get_vision_position_ids(grid, encoder.merge)}
    if encoder.window_size is not None:
        index, ends = get_vision_window_index(grid, encoder.merge, encoder.window_size, encoder.patch_size)
        places = torch.arange(len(pixels))
        found["window_segments"] = torch.searchsorted(ends.to(torch.int64), places, right=True)
    if encoder.interpolation is not None:
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid, spatial_merge_size=encoder.merge, **encoder.interpolation.model_dump()
        )
    inputs = {name: part.unflatten(0, (-1, unit)).contiguous() for name, part in found.items()}
    return [inputs if encoder.window_size is None else inputs | {"window_index": index}]


class EncoderGraph(nn.Module):
    """A loaded model's vision or audio encoder in the form to be exported."""

    def __init__(self, loaded: LoadedModel, encoder: EngineEncoder, names: list[str]) -> None:
        super().__init__()
        self.model, self.encoder = loaded.model, encoder
        self._family: MediaFamily = loaded.reader.family
        self._names = names

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the encoder: inputs in the order of `encoder_shapes` -> outputs in that order."""
        given = dict(zip(self._names, inputs, strict=True))
        if self.encoder.mask is not None:
            embeddings, heard = self._family.padded(self.model, given)
            return [(embeddings * heard[..., None])[0]]
        if not self.encoder.merge:
            output = self._family.encode(self.model, given)
            parts = getattr(output, "pooler_output", output)
            return [(parts if isinstance(parts, Tensor) else parts[0]).reshape(self.encoder.num_tokens, -1)]
        window_index = given.pop("window_index", None)
        flat = {name: part.flatten(0, 1) for name, part in given.items()}
        pixels, segments = flat.pop(PIXELS), flat.pop("window_segments", None)
        lengths: dict[str, Any] = {"cu_seqlens": _WHOLE, "max_seqlen": 1}
        if segments is not None:
            lengths |= {"cu_window_seqlens": segments, "max_window_seqlen": 1, "window_index": window_index}
        output = self.model.model.visual(pixels, grid_thw=None, return_dict=True, **flat, **lengths)
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]

    def arguments(self, inputs: list) -> tuple:
        """Groups a flat list with one entry per graph input into the arguments of `forward`."""
        return (inputs,)


class _Whole:
    """Marker passed instead of attention segments if the whole image is one segment."""


_WHOLE = _Whole()


def segmented_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in which a patch sees only patches of its own segment; query, key, value [1, heads, patches, dim]. The
    keyword `cu_seq_lens_q` is the segment index of each patch, or `_WHOLE` if the image is one segment.
    """
    segments, scaling = kwargs["cu_seq_lens_q"], kwargs["scaling"]
    scores = (query * scaling) @ key.transpose(-1, -2)
    if segments is not _WHOLE:
        apart = segments[:, None] != segments
        scores = scores.masked_fill(apart, torch.finfo(scores.dtype).min)
    mixed = functional.softmax(scores.float(), dim=-1).to(value.dtype) @ value
    return mixed.transpose(1, 2).contiguous(), None


@contextmanager
def as_encoder_graph(loaded: LoadedModel, encoder: EngineEncoder) -> Iterator[None]:
    """In this context the encoder uses attention operators that graphs support."""
    towers = loaded.reader.encoder.towers
    before = [tower.config._attn_implementation for tower in towers]
    try:
        for tower in towers:
            tower.config._attn_implementation = _SEGMENTED if encoder.merge else _PLAIN
        yield
    finally:
        for tower, name in zip(towers, before, strict=True):
            tower.config._attn_implementation = name


def export_encoder(loaded: LoadedModel, encoder: EngineEncoder, limits: Limits, ops: GraphOps, file: Path) -> None:
    """Export the graph of a model's encoder, with weights in a separate file, and check it.

    Raises:
        ExportError: torch or onnx cannot export it.
    """
    shapes = encoder_shapes(encoder, loaded.hidden_size, loaded.dtype)
    with as_encoder_graph(loaded, encoder):
        module = EncoderGraph(loaded, encoder, list(shapes.inputs)).eval()
        export_module(module, module.arguments, shapes, limits, ops.opset, file)


def encoder_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """Size ranges of the encoder's stage."""
    [stage] = ENCODER_STAGES
    return {stage: {TOKENS: SizeRange(1, limits.max_image_tokens, limits.max_image_tokens)}}


AttentionInterface.register(_SEGMENTED, segmented_attention)
