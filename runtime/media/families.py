"""The media that a model supports, according to its configuration.

This module needs only a configuration, so that routers, which have no weights, can also use it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from wingbeat.runtime.media.audio import AUDIOS
from wingbeat.runtime.media.family import MediaFamily, MediaNotServed
from wingbeat.runtime.media.media_input import ARE, AUDIO, IMAGE

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


FAMILIES = {**IMAGES, **AUDIOS}
"""Families by model_type of the whole model."""
_TOWER = {IMAGE: "vision_config", AUDIO: "audio_config"}
_SERVED = {IMAGE: IMAGES, AUDIO: AUDIOS}


def kinds_of(config: Any) -> tuple[str, ...]:
    """Returns the kinds of media for which a configuration has an encoder."""
    return tuple(kind for kind, tower in _TOWER.items() if getattr(config, tower, None) is not None)


def family_of(config: Any, kind: str) -> MediaFamily:
    """Returns the family of a transformers configuration.

    Raises:
        MediaNotServed: this kind of media is not supported for the model; the message is one line with the reason.
    """
    refused, model_type = f"{ARE[kind]} not served", config.model_type
    if (family := FAMILIES.get(model_type)) is None or family.kind != kind:
        raise MediaNotServed(f"{refused} with model_type {model_type}, but with {', '.join(_SERVED[kind])}")
    if model_type == "llava" and (tower := config.vision_config.model_type) not in TOWERS:
        raise MediaNotServed(f"{refused} with llava's vision tower {tower}, but with {', '.join(TOWERS)}")
    token_id, vocab_size = family.token_id(config), config.get_text_config().vocab_size
    if not 0 <= token_id < vocab_size:
        raise MediaNotServed(f"{refused}: the placeholder {token_id} is outside of {vocab_size} tokens")
    return family
