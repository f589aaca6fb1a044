"""Description of the media that a model family accepts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wingbeat.runtime.media.media_input import IMAGE, MediaInput


class MediaNotServed(ValueError):
    """A kind of media is not supported for a model; the message is one line with the reason."""


@dataclass(frozen=True)
class MediaFamily:
    """Models that accept one kind of media in the same way."""

    inputs: tuple[str, ...]
    """Names of the encoder's inputs; to encode several media at once, inputs are concatenated along the first
    dimension.
    """
    num_tokens: Callable[[Any, Mapping[str, np.ndarray]], int]
    """Function (config, arrays of one medium) -> number of the medium's placeholder tokens."""
    example: Callable[[Any, int, int], dict[str, np.ndarray]]
    """Function (config, rows, columns) -> arrays of a medium of random noise, in the form in which the processor
    returns arrays. The medium has rows * columns tokens, if the family allows media of any size.
    """
    kind: str = IMAGE
    padded: Callable[[Any, dict[str, Any]], tuple[Any, Any]] | None = None
    """Function (model, inputs as tensors) -> embeddings of whole windows of sound, [num_windows, tokens per window,
    hidden_size], and which of these are no padding, bool [num_windows, tokens per window]; None for images.
    """
    windows: bool = True
    """Whether a sound longer than the encoder's window is split into windows; if False, an error is raised for longer
    sounds.
    """
    marks: str | None = None
    """Argument of transformers' forward that marks the tokens of images; None if there is no such argument."""
    sees_whole_images: bool = False
    """Whether an image's tokens attend to each other in both directions."""
    rotates_in_grids: bool = False
    """Whether image tokens have RoPE positions by row and column (M-RoPE), so that the text after an image continues at
    a lower RoPE position than its position in the sequence.
    """
    surrounded: bool = False
    """Whether the text contains one mark per image, which is replaced by a boundary token, the image's tokens and
    another boundary token.
    """

    def encode(self, model: Any, tensors: dict[str, Any]) -> Any:
        """Encodes inputs with a transformers model; returns embeddings, or an output object that contains them."""
        if self.padded is not None:
            embeddings, heard = self.padded(model, tensors)
            return embeddings[heard]
        return model.get_image_features(**tensors)

    def medium(self, config: Any, start: int, arrays: Mapping[str, np.ndarray]) -> MediaInput:
        """Builds the `MediaInput` of a medium whose tokens begin at `start`."""
        length, grid = self.num_tokens(config, arrays), self.grid(config, arrays)
        return MediaInput.of(start, length, arrays, grid, self.kind, self.sees_whole_images)

    def token_id(self, config: Any) -> int:
        """Returns the placeholder token id."""
        return getattr(config, f"{self.kind}_token_id")

    def grid(self, config: Any, arrays: Mapping[str, np.ndarray]) -> tuple[int, int] | None:
        """Returns the numbers of rows and columns of an image's tokens if RoPE uses them; else None."""
        if not self.rotates_in_grids:
            return None
        merge = config.vision_config.spatial_merge_size
        _, rows, columns = arrays["image_grid_thw"][0].tolist()
        return rows // merge, columns // merge
