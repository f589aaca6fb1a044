"""A checkpoint's image or audio processor, and the placeholders in prompts; needs neither torch nor weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.hugging_face import load_files, read_config
from wingbeat.runtime.media.audio import window_shape
from wingbeat.runtime.media.families import MediaNotServed, family_of
from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import ARE, IMAGE, MediaInput


class ReadMedia(NamedTuple):
    """An image or sound as the model's encoder reads it."""

    arrays: dict[str, np.ndarray]
    num_tokens: int
    grid: tuple[int, int] | None = None


class MediaProcessor(ABC):
    """Wraps transformers' processor of a checkpoint.

    Args:
        processor: an image processor or audio feature extractor.
        config: config of the whole model.
        names: texts of the placeholder and boundary tokens in the tokenizer, by token id.
    """

    def __init__(self, processor: Any, config: Any, family: MediaFamily, names: dict[int, str]) -> None:
        self.kind = family.kind
        self._processor = processor
        self._config = config
        self._family = family
        self._token_id = family.token_id(config)
        self._token = names[self._token_id]
        self._mark = names[config.boi_token_index] if family.surrounded else self._token
        self._end = names[config.eoi_token_index] if family.surrounded else ""

    @abstractmethod
    def read(self, decoded: Any) -> ReadMedia:
        """Processes one decoded medium.

        Raises:
            ValueError: the model does not support the medium.
        """

    def expand(self, text: str, media: Sequence[ReadMedia]) -> str:
        """Replaces each mark in a prompt with the placeholder tokens of its medium, one for each token of the medium.

        Raises:
            ValueError: the number of marks differs from the number of media, for example because a user's text contains
                a mark.
        """
        parts = text.split(self._mark)
        if len(parts) - 1 != len(media) or (self._mark != self._token and self._token in text):
            raise ValueError(f"hold {self._token!r} in their text, which stands for {self.kind}")
        written = [parts[0]]
        for one, part in zip(media, parts[1:], strict=True):
            tokens = self._token * one.num_tokens
            written.append(f"\n\n{self._mark}{tokens}{self._end}\n\n" if self._family.surrounded else tokens)
            written.append(part)
        return "".join(written)

    def place(self, token_ids: Sequence[int], media: Sequence[ReadMedia]) -> tuple[MediaInput, ...]:
        """Finds the media's placeholder tokens in the tokens of an expanded prompt, and returns the media with their
        positions.

        Raises:
            ValueError: a medium's placeholder tokens are missing.
        """
        placed, at, whole = [], 0, self._family.sees_whole_images
        for one in media:
            while at < len(token_ids) and token_ids[at] != self._token_id:
                at += 1
            end = at + one.num_tokens
            if set(token_ids[at:end]) != {self._token_id} or end > len(token_ids):
                raise ValueError(f"have {self.kind} that the tokenizer does not keep whole")
            placed.append(MediaInput.of(at, one.num_tokens, one.arrays, one.grid, self.kind, whole))
            at = end
        if self._token_id in token_ids[at:]:
            raise ValueError(f"have more of the tokens that stand for {self.kind} than they have {self.kind}")
        return tuple(placed)


class ImageProcessor(MediaProcessor):
    """Processor of images; requires Pillow."""

    def read(self, decoded: Any) -> ReadMedia:
        """Processes an RGB Pillow image; see `MediaProcessor.read`."""
        options = {"do_pan_and_scan": False} if self._family.surrounded else {}
        made = self._processor(decoded, return_tensors="np", **options)
        arrays = {name: np.asarray(made[name]) for name in self._family.inputs}
        return ReadMedia(arrays, self._family.num_tokens(self._config, arrays), self._family.grid(self._config, arrays))


class AudioProcessor(MediaProcessor):
    """Whisper's feature extractor, which computes a spectrogram of each window."""

    @property
    def sampling_rate(self) -> int:
        """Number of samples per second that the model requires."""
        return self._processor.sampling_rate

    @property
    def max_seconds(self) -> float:
        """Maximum length of a sound in seconds."""
        return float("inf") if self._family.windows else float(self._processor.chunk_length)

    def read(self, decoded: np.ndarray) -> ReadMedia:
        """Processes samples at `sampling_rate`, float32 [num_samples]; see `MediaProcessor.read`."""
        size = self._processor.n_samples
        if not self._family.windows and len(decoded) > size:
            raise ValueError(
                f"it lasts {len(decoded) / self.sampling_rate:.2f} s, the model accepts at most {self.max_seconds:g} s"
            )
        made = self._processor(
            [decoded[start : start + size] for start in range(0, len(decoded), size)],
            sampling_rate=self.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )
        features, mask = self._family.inputs
        arrays = {features: made["input_features"], mask: made["attention_mask"]}
        num_tokens = self._family.num_tokens(self._config, arrays)
        if not num_tokens:
            raise ValueError("it is too short")
        return ReadMedia(arrays, num_tokens)


def load_processor(folder: Path, tokenizer: Any, kind: str) -> MediaProcessor:
    """Loads the processor of a checkpoint's folder.

    Args:
        tokenizer: transformers' tokenizer.

    Raises:
        MediaNotServed: the model's media of this kind are not supported, Pillow is missing, or transformers cannot read
            the processor.
    """
    try:
        config = read_config(folder)
        family = family_of(config, kind)
        made = _image_processor(folder) if kind == IMAGE else _audio_processor(folder, config)
    except MediaNotServed:
        raise
    except ImportError as error:
        raise MediaNotServed("images need Pillow, which is in the extra wingbeat[images]") from error
    except Exception as error:
        # All exceptions are caught, because transformers raises many classes of exceptions for damaged or missing
        # files.
        reason = " ".join(str(error).split())[:200]
        raise MediaNotServed(f"{ARE[kind]} not served: no processor of {kind} in {folder}: {reason}") from error
    ids = [family.token_id(config)]
    ids += [config.boi_token_index, config.eoi_token_index] if family.surrounded else []
    names = dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
    return (ImageProcessor if kind == IMAGE else AudioProcessor)(made, config, family, names)


def _image_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return load_files(AutoImageProcessor, folder, backend="pil")


def _audio_processor(folder: Path, config: Any) -> Any:
    """Loads the feature extractor; raises ValueError unless it is Whisper's and its spectrograms fit the encoder."""
    from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

    made = load_files(AutoFeatureExtractor, folder)
    if not isinstance(made, WhisperFeatureExtractor):
        raise ValueError(f"it is a {type(made).__name__}, not a WhisperFeatureExtractor")
    wanted = window_shape(config)
    if (made.feature_size, made.nb_max_frames) != wanted:
        raise ValueError(
            f"its windows are {made.feature_size} x {made.nb_max_frames}, those of the model {wanted[0]} x {wanted[1]}"
        )
    return made
