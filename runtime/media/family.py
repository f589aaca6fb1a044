"""What serving needs to know of the media that a model takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wingbeat.runtime.media.media_input import IMAGE, MediaInput


class MediaNotServed(ValueError):
    """A model's media are not served; one line that says why."""


@dataclass(frozen=True)
class MediaFamily:
    """Of models that take one kind of media in the same way."""

    inputs: tuple[str, ...]
    """Of the encoder, first dimensions side by side where several are encoded at once."""
    num_tokens: Callable[[Any, Mapping[str, np.ndarray]], int]
    """(config, arrays of one) -> its placeholder tokens."""
    example: Callable[[Any, int, int], dict[str, np.ndarray]]
    """(config, rows, columns) -> one of noise, as its processor would hand it over; of so many tokens where the family
    leaves that to it."""
    kind: str = IMAGE
    features: Callable[[Any, dict[str, Any]], Any] | None = None
    """(model, inputs as tensors) -> [num_tokens, hidden_size], where the model has no method of its own for it."""
    windows: bool = True
    """A sound longer than the encoder's window is several windows; it is refused where this is False."""
    marks: str | None = None
    """The argument of transformers' forward that tells an image's tokens from others'."""
    sees_whole_images: bool = False
    """An image's tokens attend to each other in both directions."""
    rotates_in_grids: bool = False
    """Tokens of an image are rotated by row and column, and the text behind it as if the image were shorter."""
    surrounded: bool = False
    """In text one mark stands for an image, and becomes its tokens between two marks."""

    def encode(self, model: Any, tensors: dict[str, Any]) -> Any:
        """What a model of transformers makes of inputs as tensors: embeddings, or an output that has them."""
        if self.features is not None:
            return self.features(model, tensors)
        return getattr(model, f"get_{self.kind}_features")(**tensors)

    def medium(self, config: Any, start: int, arrays: Mapping[str, np.ndarray]) -> MediaInput:
        """Medium whose tokens begin at a position."""
        length, grid = self.num_tokens(config, arrays), self.grid(config, arrays)
        return MediaInput.of(start, length, arrays, grid, self.kind, self.sees_whole_images)

    def token_id(self, config: Any) -> int:
        """The placeholder."""
        return getattr(config, f"{self.kind}_token_id")

    def grid(self, config: Any, arrays: Mapping[str, np.ndarray]) -> tuple[int, int] | None:
        """Rows and columns of an image's tokens, where they matter."""
        if not self.rotates_in_grids:
            return None
        merge = config.vision_config.spatial_merge_size
        _, rows, columns = arrays["image_grid_thw"][0].tolist()
        return rows // merge, columns // merge
