"""Pooling of a prompt's hidden states into its embedding; imports no torch, because routers use it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from wingbeat.runtime.scheduling.request import PromptReport

if TYPE_CHECKING:
    import numpy as np


class Pooling(PromptReport, StrEnum):
    """Reports the mean of a prompt's hidden states, or the last hidden state: float32 [hidden_size], not normalised."""

    MEAN = "mean"
    LAST = "last"

    @property
    def is_of_all(self) -> bool:
        """See `PromptReport.is_of_all`."""
        return self is Pooling.MEAN

    def made_of(self, rows: "Sequence[np.ndarray]", num_prompt_tokens: int) -> bytes:
        """See `PromptReport.made_of`; a row is the sum of a chunk's hidden states, or the prompt's last hidden state.

        Raises:
            RuntimeError: this engine's model does not expose its hidden states.
        """
        if not rows:
            raise RuntimeError("the engine returned no hidden states for this prompt")
        number = num_prompt_tokens if self is Pooling.MEAN else 1
        return (sum(rows) / number).astype("<f4").tobytes()
