"""Supported audio-language models: spectrograms of audio windows, and the number of tokens of a window."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import AUDIO

if TYPE_CHECKING:
    from torch import Tensor

_CONVOLVED = 2
"""Number of spectrogram frames per encoder position."""


def _family(mask: str, pooled: int, **fields: Any) -> MediaFamily:
    """Returns a family with a Whisper encoder, in which `pooled` encoder positions become one token.

    Args:
        mask: the encoder's input name of the frame mask: int [num_windows, frames per window].
    """

    def num_tokens(config: Any, arrays: Mapping[str, np.ndarray]) -> int:
        positions = -(-arrays[mask].sum(axis=-1) // _CONVOLVED)
        return int((positions // pooled).sum())

    return MediaFamily(("input_features", mask), num_tokens, _noise(mask, pooled), kind=AUDIO, **fields)


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
        return {"input_features": features, mask: heard.astype(np.int64)}

    return example


def _qwen2_audio_features(model: Any, tensors: "dict[str, Tensor]") -> "Tensor":
    """Computes Qwen2-Audio's audio embeddings [num_audio_tokens, hidden_size]; transformers has no method for them."""
    import torch
    from transformers.masking_utils import create_bidirectional_mask

    features, tower = tensors["input_features"], model.model.audio_tower
    positions, tokens = tower._get_feat_extract_output_lengths(tensors["feature_attention_mask"].sum(-1))
    index = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=features.new_zeros(len(features), len(index), 1),
        attention_mask=(index < positions[:, None]).long(),
    )
    hidden = model.model.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state)
    return hidden[index[: hidden.shape[1]] < tokens[:, None]]


AUDIOS = {
    "qwen2_audio": _family("feature_attention_mask", 2, features=_qwen2_audio_features, windows=False),
    "audioflamingo3": _family("input_features_mask", 2),
    "glmasr": _family("input_features_mask", 4),
}
"""Families by model_type of the whole model."""
