"""Drafter inputs for prompt chunks with spans (images, ...): embeddings and rotary positions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.scheduling.prompt_spans import PromptSpan


class PlacedChunk(NamedTuple):
    """Chunk whose drafter inputs are needed."""

    start: int
    """Position of the chunk's first pair."""
    length: int
    spans: tuple[PromptSpan, ...]
    """Spans of the whole prompt."""


TellInputs = Callable[[Any, list[PlacedChunk]], int]
"""Function (outcome, chunks of the outcome) that writes the inputs for which the outcome has fields, and returns the
value of `RoundHeader.has_inputs`.
"""


class ChunkInputs(NamedTuple):
    """Drafter inputs of pairs (taps at position i, token i + 1), in the order of the chunks.

    A pair's rotary position is its token's rotary position minus one; for text, this is i. Trainers of heads on prompts
    with spans number positions in the same way, because trainers leave out a sequence's first token.
    """

    axes: Tensor
    """int64 [num_tokens, 3 or 0]: rotary position of each pair on each axis; 0 columns if rotary positions equal the
    pairs' positions."""
    shown: Tensor
    """int64 [num_tokens or 0]: 1 if the token belongs to a span, else 0. The tensor has 0 rows if the drafter reads no
    embeddings."""
    embeddings: Tensor
    """[num_tokens, embedding_width]: embeddings that the verifier read in place of the token embeddings; valid where
    `shown` is 1."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "ChunkInputs":
        """Copies the inputs to a device."""
        return ChunkInputs(*(part.to(device, non_blocking=non_blocking) for part in self))

    def positions(self, plain: Tensor) -> Tensor:
        """Maps positions of pairs, int64 [num_tokens], to rotary positions, int64 [num_tokens] or [3, num_tokens]."""
        return self.axes.T if self.axes.shape[1] else plain

    def embedded(self, own: Tensor) -> Tensor:
        """Returns the token embeddings `own` [num_tokens, size], with the spans' embeddings in the rows of spans."""
        if not len(self.shown) or own.shape[1] != self.embeddings.shape[1]:
            return own
        return torch.where(self.shown[:, None] > 0, self.embeddings.to(own.dtype), own)
