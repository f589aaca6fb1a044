"""What drafters are told of images and audio in pieces of prompts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PlacedMedia(NamedTuple):
    """A chunk, as who tells of media is asked for it."""

    start: int
    """Position of its first pair."""
    length: int
    media: tuple[Any, ...]
    """`scheduling.media.MediaInput`, those of the whole prompt."""


TellMedia = Callable[[Any, list[PlacedMedia]], int]
"""(outcome, its chunks) -> `RoundHeader.has_media`; fills in what the outcome has room for."""


class ChunkMedia(NamedTuple):
    """Of pairs (taps at position i, token i + 1), chunk behind chunk.

    A pair is rotated by where its token stands, less one: that is i in a text, and trainers of heads that have seen
    images give the same, because they number the tokens of a sequence without its first.
    """

    axes: Tensor
    """int64 [num_tokens, 3 or 0]: by what a pair is rotated, on each axis; 0 columns where that is its position."""
    shown: Tensor
    """int64 [num_tokens or 0]: 1 where the token stands for a part of an image or a sound; 0 rows: nobody looks."""
    embeddings: Tensor
    """[num_tokens, media_width]: the part's, which the model had in the place of the token's own; read where shown."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "ChunkMedia":
        """On a device."""
        return ChunkMedia(*(part.to(device, non_blocking=non_blocking) for part in self))

    def of(self, rows: slice) -> "ChunkMedia":
        """Of some of the pairs."""
        return ChunkMedia(*(part[rows] for part in self))

    def positions(self, plain: Tensor) -> Tensor:
        """What pairs at positions int64 [num_tokens] are rotated by: int64 [num_tokens] or [3, num_tokens]."""
        return self.axes.T if self.axes.shape[1] else plain

    def embedded(self, own: Tensor) -> Tensor:
        """Embeddings [num_tokens, size] of the pairs' tokens, parts of images and sounds in the place of their own."""
        if not len(self.shown) or own.shape[1] != self.embeddings.shape[1]:
            return own
        return torch.where(self.shown[:, None] > 0, self.embeddings.to(own.dtype), own)


def joined(parts: list[tuple[ChunkMedia | None, Tensor]]) -> ChunkMedia | None:
    """Of the chunks of several verifiers; None where none of them has any.

    Args:
        parts: what each says, and the positions int64 [num_tokens] of its pairs, by which those of a text are rotated.
    """
    told = [media for media, _ in parts if media is not None]
    if not told:
        return None
    num_axes = max(media.axes.shape[1] for media in told)
    widest = max((media.embeddings for media in told), key=lambda embeddings: embeddings.shape[1])
    filled = [_filled(media, positions, num_axes, widest) for media, positions in parts]
    return ChunkMedia(*(torch.cat(columns) for columns in zip(*filled, strict=True)))


def _filled(media: ChunkMedia | None, positions: Tensor, num_axes: int, like: Tensor) -> ChunkMedia:
    """With as many columns as those beside it."""
    count = len(positions)
    axes = positions[:, None].expand(count, num_axes)
    shown, embeddings = positions.new_zeros(count), like.new_zeros(count, like.shape[1])
    if media is None:
        return ChunkMedia(axes, shown, embeddings)
    if not media.axes.shape[1]:
        media = media._replace(axes=axes)
    return media if len(media.shown) == count else media._replace(shown=shown, embeddings=embeddings)
