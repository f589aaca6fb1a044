"""Measures, with transformers on trial texts, how much a model's logits change in a dtype narrower than the
checkpoint's.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from wingbeat.runtime.model_trial.reference import decoded_rows, distance, trial_texts
from wingbeat.runtime.verifier.checkpoints.checkpoint import load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.layers.loaded_model import num_words


class Rounding(NamedTuple):
    """Differences between the logits in two dtypes."""

    distance: float
    """Largest difference of a logit over all rows, relative to the spread of that row's logits."""
    num_other: int
    """Number of rows whose best token differs between the two dtypes."""
    num_rows: int

    def __str__(self) -> str:
        return (
            f"logits differ by up to {self.distance:.1e} of their spread, and {self.num_other} of {self.num_rows} best "
            "tokens are others"
        )


@torch.inference_mode()
def rounding_between(folder: Path, stored: torch.dtype, narrower: torch.dtype) -> Rounding:
    """Compare a checkpoint in two dtypes, loaded one after the other on the host.

    Raises:
        ModelCheckpointError: the checkpoint cannot be loaded.
    """
    exact, rounded = (_rows(ConfigFile.read(folder), dtype) for dtype in (stored, narrower))
    return Rounding(
        max(map(distance, rounded, exact)),
        int((rounded.argmax(dim=-1) != exact.argmax(dim=-1)).sum()),
        len(exact),
    )


def _rows(file: ConfigFile, dtype: torch.dtype) -> torch.Tensor:
    model = load_weights(file, dtype).eval()
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 64
    texts = trial_texts((), positions, num_words(model.get_output_embeddings()))
    model.set_attn_implementation("eager")
    return torch.cat([decoded_rows(model, text) for text in texts])
