"""Supported vision-language models: the number of tokens of an image, and the attention between these tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from wingbeat.runtime.media.family import MediaFamily

TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision encoders of LLaVA models, each with the number of its output tokens that are not patches."""


def _llava_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
    rows, columns = (size // config.vision_config.patch_size for size in arrays["pixel_values"].shape[-2:])
    extra = TOWERS[config.vision_config.model_type]
    return rows * columns + extra - (config.vision_feature_select_strategy == "default")


def _gemma_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
    return config.mm_tokens_per_image * len(arrays["pixel_values"])


def _grid_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
    return int(arrays["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2


def _square(config: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    shape = (1, 3, config.vision_config.image_size, config.vision_config.image_size)
    return {"pixel_values": np.random.default_rng(rows + columns).standard_normal(shape, dtype=np.float32)}


def _patches(config: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    vision, random = config.vision_config, np.random.default_rng(rows + columns)
    merge = vision.spatial_merge_size
    grid = np.array([[1, rows * merge, columns * merge]])
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = random.standard_normal((int(grid.prod()), width), dtype=np.float32)
    return {"pixel_values": pixels, "image_grid_thw": grid}


_GRIDS = MediaFamily(
    ("pixel_values", "image_grid_thw"), _grid_tokens, _patches, marks="mm_token_type_ids", rotates_in_grids=True
)
IMAGES = {
    "llava": MediaFamily(("pixel_values",), _llava_tokens, _square),
    "gemma3": MediaFamily(
        ("pixel_values",), _gemma_tokens, _square, marks="token_type_ids", sees_whole_images=True, surrounded=True
    ),
    "qwen2_vl": _GRIDS,
    "qwen2_5_vl": _GRIDS,
    "qwen3_vl": _GRIDS,
    "qwen3_vl_moe": _GRIDS,
    "qwen3_5": _GRIDS,
    "qwen3_5_moe": _GRIDS,
}
"""Families by model_type of the whole model."""
