"""A checkpoint's image processor, and how images stand in its prompts; no torch, no weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.scheduling.images import ImageInput
from wingbeat.runtime.vision.families import ImagesNotServed, VisionFamily, family_of


class ReadImage(NamedTuple):
    """An image as the model's encoder takes it."""

    arrays: dict[str, np.ndarray]
    num_tokens: int
    grid: tuple[int, int] | None


class ImageProcessor:
    """transformers' own processor of a checkpoint, the one that needs Pillow alone.

    Args:
        processor: `AutoImageProcessor`'s.
        config: of the whole model.
        names: by id, how the tokenizer writes the tokens that stand for images and around them.
    """

    def __init__(self, processor: Any, config: Any, family: VisionFamily, names: dict[int, str]) -> None:
        self._processor = processor
        self._config = config
        self._family = family
        self._token_id = config.image_token_id
        self._token = names[self._token_id]
        self._mark = names[config.boi_token_index] if family.surrounded else self._token
        self._end = names[config.eoi_token_index] if family.surrounded else ""

    @classmethod
    def load(cls, folder: Path, tokenizer: Any) -> "ImageProcessor":
        """Of a checkpoint's folder.

        Args:
            tokenizer: transformers' own.

        Raises:
            ImagesNotServed: its images are not served, Pillow is missing, or transformers cannot read the processor.
        """
        from transformers import AutoConfig, AutoImageProcessor

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            family = family_of(config)
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except ImagesNotServed:
            raise
        except ImportError as error:
            raise ImagesNotServed("images need Pillow, which is in the extra wingbeat[images]") from error
        except Exception as error:
            # As with tokenizers, a damaged or missing file raises nearly anything.
            reason = " ".join(str(error).split())[:200]
            raise ImagesNotServed(f"images are not served: no image processor in {folder}: {reason}") from error
        ids = [config.image_token_id]
        ids += [config.boi_token_index, config.eoi_token_index] if family.surrounded else []
        return cls(processor, config, family, dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)))

    def read(self, picture: Any) -> ReadImage:
        """A picture of Pillow, in RGB.

        Raises:
            ValueError: the processor takes none of its shape.
        """
        options = {"do_pan_and_scan": False} if self._family.surrounded else {}
        made = self._processor(picture, return_tensors="np", **options)
        arrays = {name: np.asarray(made[name]) for name in self._family.inputs}
        return ReadImage(arrays, self._family.num_tokens(self._config, arrays), self._family.grid(self._config, arrays))

    def expand(self, text: str, images: Sequence[ReadImage]) -> str:
        """A prompt in which each mark has become as many tokens as its image has.

        Raises:
            ValueError: it has other marks than those of its images, such as text that looks like one.
        """
        parts = text.split(self._mark)
        if len(parts) - 1 != len(images) or (self._mark != self._token and self._token in text):
            raise ValueError(f"hold {self._token!r} in their text, which stands for an image")
        written = [parts[0]]
        for image, part in zip(images, parts[1:], strict=True):
            tokens = self._token * image.num_tokens
            written.append(f"\n\n{self._mark}{tokens}{self._end}\n\n" if self._family.surrounded else tokens)
            written.append(part)
        return "".join(written)

    def place(self, token_ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[ImageInput, ...]:
        """Where the images are in an expanded prompt's tokens.

        Raises:
            ValueError: they are not there.
        """
        placed, at = [], 0
        for image in images:
            while at < len(token_ids) and token_ids[at] != self._token_id:
                at += 1
            end = at + image.num_tokens
            if set(token_ids[at:end]) != {self._token_id} or end > len(token_ids):
                raise ValueError("have images that the tokenizer does not keep whole")
            placed.append(ImageInput.of(at, image.num_tokens, image.arrays, image.grid))
            at = end
        if self._token_id in token_ids[at:]:
            raise ValueError("have more of the tokens that stand for images than images")
        return tuple(placed)
