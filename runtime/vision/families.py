"""The vision-language models whose images are served: how many tokens an image has, and what attends to them how.

Read from a configuration, so that routers, which have no weights, know it too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Of LLaVA: tokens of a tower beside its patches."""


class ImagesNotServed(ValueError):
    """A model's images are not served; one line that says why."""


@dataclass(frozen=True)
class VisionFamily:
    """What serving needs to know of a family's images."""

    inputs: tuple[str, ...]
    """Of its encoder, first dimensions side by side where several images are encoded at once."""
    num_tokens: Callable[[Any, Mapping[str, np.ndarray]], int]
    """(config, an image's arrays) -> its placeholder tokens."""
    marks: str | None = None
    """The argument of transformers' forward that tells an image's tokens from others'."""
    sees_whole_images: bool = False
    """An image's tokens attend to each other in both directions."""
    rotates_in_grids: bool = False
    """Tokens of an image are rotated by row and column, and the text behind it as if the image were shorter."""
    surrounded: bool = False
    """In text one mark stands for an image, and becomes its tokens between two marks."""

    def grid(self, config: Any, arrays: Mapping[str, np.ndarray]) -> tuple[int, int] | None:
        """Rows and columns of an image's tokens, where they matter."""
        if not self.rotates_in_grids:
            return None
        merge = config.vision_config.spatial_merge_size
        _, rows, columns = arrays["image_grid_thw"][0].tolist()
        return rows // merge, columns // merge

    def example(self, config: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
        """An image of noise, as its processor would hand it over.

        Args:
            rows, columns: of its tokens, where the family leaves that to the image.
        """
        vision, random = config.vision_config, np.random.default_rng(rows + columns)
        if not self.rotates_in_grids:
            shape = (1, 3, vision.image_size, vision.image_size)
            return {"pixel_values": random.standard_normal(shape, dtype=np.float32)}
        merge = vision.spatial_merge_size
        grid = np.array([[1, rows * merge, columns * merge]])
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = random.standard_normal((int(grid.prod()), width), dtype=np.float32)
        return {"pixel_values": pixels, "image_grid_thw": grid}


def _llava_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
    rows, columns = (size // config.vision_config.patch_size for size in arrays["pixel_values"].shape[-2:])
    extra = _TOWERS[config.vision_config.model_type]
    return rows * columns + extra - (config.vision_feature_select_strategy == "default")


def _gemma_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
    return config.mm_tokens_per_image * len(arrays["pixel_values"])


def _grid_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
    return int(arrays["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2


_GRIDS = VisionFamily(
    ("pixel_values", "image_grid_thw"), _grid_tokens, marks="mm_token_type_ids", rotates_in_grids=True
)
FAMILIES = {
    "llava": VisionFamily(("pixel_values",), _llava_tokens),
    "gemma3": VisionFamily(
        ("pixel_values",), _gemma_tokens, marks="token_type_ids", sees_whole_images=True, surrounded=True
    ),
    "qwen2_vl": _GRIDS,
    "qwen2_5_vl": _GRIDS,
    "qwen3_vl": _GRIDS,
    "qwen3_vl_moe": _GRIDS,
}
"""By model_type of the whole model."""


def family_of(config: Any) -> VisionFamily:
    """The family of a configuration of transformers.

    Raises:
        ImagesNotServed: its images are not served; one line that names what is in the way.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ImagesNotServed(f"images of model_type {kind} are not served; those of {', '.join(FAMILIES)} are")
    tower = config.vision_config.model_type
    if kind == "llava" and tower not in _TOWERS:
        raise ImagesNotServed(f"images of llava with a vision tower {tower} are not served; {', '.join(_TOWERS)} are")
    token_id, vocab_size = config.image_token_id, config.get_text_config().vocab_size
    if not 0 <= token_id < vocab_size:
        raise ImagesNotServed(f"images are not served: their placeholder {token_id} is outside of {vocab_size} tokens")
    return FAMILIES[kind]
