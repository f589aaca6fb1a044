"""The vision encoder as a separate graph, one image per pass; tensors derived from the image's grid are inputs.

These tensors are computed on the host; the encoders in transformers accept them as arguments.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import IMAGE
from wingbeat.runtime.tensorrt.engine_config import EngineVisual
from wingbeat.runtime.tensorrt.export import export_module
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import TOKENS, GraphShapes, Profile, SizeRange
from wingbeat.runtime.tensorrt.limits import Limits
from wingbeat.runtime.tensorrt.session import VISUAL_STAGES, EngineStage, TensorSpec
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

PIXELS = "pixel_values"
_SEGMENTED = "wingbeat_flash_graph"
"""Name of the attention function. Because the name contains "flash", transformers' encoders call the function once with
the whole image, not once per window.
"""
_PLAIN = "eager"


def visual_of(loaded: LoadedModel) -> EngineVisual | None:
    """The vision encoder's entry in an engine directory's config; None if the model takes no images."""
    media = loaded.reader
    if media is None or media.family.kind != IMAGE:
        return None
    family, config = media.family, loaded.model.config
    vision, example = config.vision_config, family.example(config, 2, 2)
    fields: dict[str, Any] = {"num_axes": 3 if family.rotates_in_grids else 0}
    if "image_grid_thw" not in family.inputs:
        fields |= {"pixels": example[PIXELS].shape[1:], "num_tokens": family.num_tokens(config, example)}
        return EngineVisual(**fields)
    tower = loaded.model.model.visual
    if (window := getattr(tower, "window_size", None)) is not None:
        fields |= {"window_size": window, "patch_size": tower.patch_size}
    if (side := getattr(tower, "num_grid_per_side", None)) is not None:
        ways = {"mode": tower.interpolation_mode, "align_corners": tower.interpolation_align_corners}
        fields |= {"interpolation": {"num_grid_per_side": side, **ways}}
    fields["num_deep"] = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return EngineVisual(pixels=example[PIXELS].shape[1:], merge=vision.spatial_merge_size, **fields)


def visual_shapes(visual: EngineVisual, hidden_size: int, dtype: torch.dtype) -> GraphShapes:
    """Shapes of the encoder's graph; the dimension `TOKENS` is free if images are grids of patches."""
    if not visual.merge:
        output = TensorSpec(dtype, (visual.num_tokens, hidden_size))
        return GraphShapes({PIXELS: TensorSpec(dtype, (1, *visual.pixels))}, {"embeddings": output})
    unit = (TOKENS, visual.merge**2)
    inputs = {PIXELS: TensorSpec(dtype, (*unit, *visual.pixels)), "position_ids": TensorSpec(torch.int64, (*unit, 2))}
    if visual.window_size is not None:
        inputs["window_index"] = TensorSpec(torch.int64, (TOKENS,))
        inputs["window_segments"] = TensorSpec(torch.int64, unit)
    if visual.interpolation is not None:
        inputs["interp_indices"] = TensorSpec(torch.int64, (*unit, visual.num_taps))
        inputs["interp_weights"] = TensorSpec(torch.float32, (*unit, visual.num_taps))
    names = ["embeddings", *(f"deep_{layer}" for layer in range(visual.num_deep))]
    return GraphShapes(inputs, dict.fromkeys(names, TensorSpec(dtype, (TOKENS, hidden_size))))


def visual_inputs(visual: EngineVisual, arrays: Mapping[str, Tensor], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Graph inputs of an image, one entry per pass of the graph. An image that is a grid of patches takes one pass; an
    image that is split into crops takes one pass per crop.

    Args:
        visual: config of the encoder.
        arrays: output of the image processor.
        dtype: dtype of the pixels.
    """
    pixels = arrays[PIXELS].to(dtype)
    if not visual.merge:
        return [{PIXELS: crop} for crop in pixels.split(1)]
    grid, unit = arrays["image_grid_thw"], visual.merge**2
    found = {PIXELS: pixels, "position_ids": get_vision_position_ids(grid, visual.merge)}
    if visual.window_size is not None:
        index, ends = get_vision_window_index(grid, visual.merge, visual.window_size, visual.patch_size)
        places = torch.arange(len(pixels))
        found["window_segments"] = torch.searchsorted(ends.to(torch.int64), places, right=True)
    if visual.interpolation is not None:
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid, spatial_merge_size=visual.merge, **visual.interpolation.model_dump()
        )
    inputs = {name: part.unflatten(0, (-1, unit)).contiguous() for name, part in found.items()}
    return [inputs if visual.window_size is None else inputs | {"window_index": index}]


class VisualGraph(nn.Module):
    """A loaded model's vision encoder in the form to be exported."""

    def __init__(self, loaded: LoadedModel, visual: EngineVisual, names: list[str]) -> None:
        super().__init__()
        self.model, self.visual = loaded.model, visual
        self._family: MediaFamily = loaded.reader.family
        self._names = names

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the encoder: inputs in the order of `visual_shapes` -> outputs in that order."""
        given = dict(zip(self._names, inputs, strict=True))
        if not self.visual.merge:
            output = self._family.encode(self.model, given)
            parts = getattr(output, "pooler_output", output)
            return [(parts if isinstance(parts, Tensor) else parts[0]).reshape(self.visual.num_tokens, -1)]
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
def as_visual_graph(loaded: LoadedModel, visual: EngineVisual) -> Iterator[None]:
    """In this context the encoder uses attention operators that graphs support."""
    towers = loaded.reader.encoder.towers
    before = [tower.config._attn_implementation for tower in towers]
    try:
        for tower in towers:
            tower.config._attn_implementation = _SEGMENTED if visual.merge else _PLAIN
        yield
    finally:
        for tower, name in zip(towers, before, strict=True):
            tower.config._attn_implementation = name


def export_visual(loaded: LoadedModel, visual: EngineVisual, limits: Limits, ops: GraphOps, file: Path) -> None:
    """Export the graph of a model's vision encoder, with weights in a separate file, and check it.

    Raises:
        ExportError: torch or onnx cannot export it.
    """
    shapes = visual_shapes(visual, loaded.hidden_size, loaded.dtype)
    with as_visual_graph(loaded, visual):
        module = VisualGraph(loaded, visual, list(shapes.inputs)).eval()
        export_module(module, module.arguments, shapes, limits, ops.opset, file)


def visual_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """Size ranges of the vision encoder's stage."""
    [stage] = VISUAL_STAGES
    return {stage: {TOKENS: SizeRange(1, limits.max_image_tokens, limits.max_image_tokens)}}


AttentionInterface.register(_SEGMENTED, segmented_attention)
