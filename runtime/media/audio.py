"""Supported audio-language models: spectrograms of audio windows, and the number of tokens of a window."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import AUDIO

if TYPE_CHECKING:
    from torch import Tensor

FEATURES = "input_features"
"""Name of the encoders' spectrograms, float32 [num_windows, mel bins, frames per window]."""
_CONVOLVED = 2
"""Number of spectrogram frames per encoder position."""


def _family(mask: str, pooled: int, tower: "Callable[[Any, Tensor, Tensor], Tensor]", **fields: Any) -> MediaFamily:
    """Returns a family with a Whisper encoder, in which `pooled` encoder positions become one token.

    Args:
        mask: the encoder's input name of the frame mask: int [num_windows, frames per window].
        tower: function (model, spectrograms, frame mask) -> output of the encoder, whose rows are tokens.
    """

    def num_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
        positions = -(-arrays[mask].sum(axis=-1) // _CONVOLVED)
        return int((positions // pooled).sum())

    padded = _padded(tower, mask, pooled)
    return MediaFamily((FEATURES, mask), num_tokens, _noise(mask, pooled), kind=AUDIO, padded=padded, **fields)


def window_shape(config: Any) -> tuple[int, int]:
    """Returns mel bins and frames of a window's spectrogram."""
    audio = config.audio_config
    positions = getattr(audio, "max_source_positions", None) or audio.max_position_embeddings
    return audio.num_mel_bins, _CONVOLVED * positions


def _noise(mask: str, pooled: int) -> Callable[[Any, int, int], dict[str, np.ndarray]]:
    def example(config: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
        (height, width), num_frames = window_shape(config), _CONVOLVED * pooled * rows * columns
        count = -(-num_frames // width)
        features = np.random.default_rng(rows + columns).standard_normal((count, height, width), dtype=np.float32)
        heard = np.arange(count * width).reshape(count, width) < num_frames
        return {FEATURES: features, mask: heard.astype(np.int32)}

    return example


def _padded(
    tower: "Callable[[Any, Tensor, Tensor], Tensor]", mask: str, pooled: int
) -> "Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor]]":
    """Returns `MediaFamily.padded`; the arguments are those of `_family`."""

    def padded(model: Any, tensors: "dict[str, Tensor]") -> "tuple[Tensor, Tensor]":
        import torch

        features, frames = tensors[FEATURES], tensors[mask]
        embeddings = model.model.multi_modal_projector(tower(model, features, frames))
        index = torch.arange(embeddings.shape[1], device=features.device)
        return embeddings, index < (_num_positions(frames) // pooled)[:, None]

    return padded


def _num_positions(frames: "Tensor") -> "Tensor":
    """Number of encoder positions of each window that are no padding, int64 [num_windows]."""
    return (frames.sum(-1) + 1) // _CONVOLVED


def _qwen2_audio(model: Any, features: "Tensor", frames: "Tensor") -> "Tensor":
    import torch
    from transformers.masking_utils import create_bidirectional_mask

    tower, index = model.model.audio_tower, torch.arange(frames.shape[-1] // _CONVOLVED, device=features.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=features.new_zeros(len(features), len(index), 1),
        attention_mask=index < _num_positions(frames)[:, None],
    )
    return tower(features, attention_mask=mask).last_hidden_state


def _audio_flamingo(model: Any, features: "Tensor", frames: "Tensor") -> "Tensor":
    return model.model.audio_tower(features, input_features_mask=frames).last_hidden_state


def _glm_asr(model: Any, features: "Tensor", frames: "Tensor") -> "Tensor":
    hidden, config = model.model.audio_tower(features).last_hidden_state, model.config.audio_config
    return hidden.reshape(len(features), -1, config.intermediate_size)


AUDIOS = {
    "qwen2_audio": _family("feature_attention_mask", 2, _qwen2_audio, windows=False),
    "audioflamingo3": _family("input_features_mask", 2, _audio_flamingo),
    "glmasr": _family("input_features_mask", 4, _glm_asr),
}
"""Families by model_type of the whole model."""
