"""Inputs of drafters for pieces of prompts whose tokens stand for more than text: embeddings, and rotations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.scheduling.prompt_spans import PromptSpan


class PlacedChunk(NamedTuple):
    """A chunk whose inputs are asked for."""

    start: int
    """Position of its first pair."""
    length: int
    spans: tuple[PromptSpan, ...]
    """Spans of the whole prompt."""


TellInputs = Callable[[Any, list[PlacedChunk]], int]
"""(outcome, its chunks) -> `RoundHeader.has_inputs`; fills in what the outcome has room for."""


class ChunkInputs(NamedTuple):
    """Inputs of pairs (taps at position i, token i + 1), chunk behind chunk.

    A pair is rotated by where its token stands, less one: that is i in a text, and trainers of heads on prompts with
    spans give the same, because they number the tokens of a sequence without its first.
    """

    axes: Tensor
    """int64 [num_tokens, 3 or 0]: by what a pair is rotated, on each axis; 0 columns where that is its position."""
    shown: Tensor
    """int64 [num_tokens or 0]: 1 where the token is one of a span; 0 rows: nobody looks."""
    embeddings: Tensor
    """[num_tokens, embedding_width]: what the model read in the place of the tokens' own; read where shown."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "ChunkInputs":
        """On a device."""
        return ChunkInputs(*(part.to(device, non_blocking=non_blocking) for part in self))

    def of(self, rows: slice) -> "ChunkInputs":
        """Inputs of some of the pairs."""
        return ChunkInputs(*(part[rows] for part in self))

    def positions(self, plain: Tensor) -> Tensor:
        """Rotations of pairs at positions int64 [num_tokens]: int64 [num_tokens] or [3, num_tokens]."""
        return self.axes.T if self.axes.shape[1] else plain

    def embedded(self, own: Tensor) -> Tensor:
        """Embeddings [num_tokens, size] of the pairs' tokens, those of spans in the place of the tokens' own."""
        if not len(self.shown) or own.shape[1] != self.embeddings.shape[1]:
            return own
        return torch.where(self.shown[:, None] > 0, self.embeddings.to(own.dtype), own)


def joined(parts: list[tuple[ChunkInputs | None, Tensor]]) -> ChunkInputs | None:
    """Inputs of several verifiers' chunks; None where none has any.

    Args:
        parts: what each says, and the positions int64 [num_tokens] of its pairs, by which those of a text are rotated.
    """
    told = [one for one, _ in parts if one is not None]
    if not told:
        return None
    num_axes = max(one.axes.shape[1] for one in told)
    widest = max((one.embeddings for one in told), key=lambda embeddings: embeddings.shape[1])
    filled = [_filled(one, positions, num_axes, widest) for one, positions in parts]
    return ChunkInputs(*(torch.cat(columns) for columns in zip(*filled, strict=True)))


def _filled(told: ChunkInputs | None, positions: Tensor, num_axes: int, like: Tensor) -> ChunkInputs:
    """With as many columns as those beside it."""
    count = len(positions)
    axes = positions[:, None].expand(count, num_axes)
    shown, embeddings = positions.new_zeros(count), like.new_zeros(count, like.shape[1])
    if told is None:
        return ChunkInputs(axes, shown, embeddings)
    if not told.axes.shape[1]:
        told = told._replace(axes=axes)
    return told if len(told.shown) == count else told._replace(shown=shown, embeddings=embeddings)
