"""Rows of a round that hold images or audio: their embeddings, what they see, and what they are rotated by."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from wingbeat.runtime.media.encoder import MediaEncoder
from wingbeat.runtime.media.positions import rotations
from wingbeat.runtime.media.telling import tell
from wingbeat.runtime.protocol.chunk_media import PlacedMedia
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Feature, Placed
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.media import MediaInput
from wingbeat.runtime.scheduling.plan import Chunk
from wingbeat.runtime.scheduling.request import Request


class MediaRows(NamedTuple):
    """Rows of a flattened batch in whose place features of media come."""

    rows: Tensor
    """int64 [num_media_rows]"""
    embeddings: Tensor
    """[num_media_rows, hidden_size]"""
    deep: tuple[Tensor, ...] = ()
    """As `MediaFeatures.deep`, of these rows."""


class MediaPart:
    """What a model that takes media of one kind adds to a batch.

    Args:
        config: of the whole model.
    """

    def __init__(self, config: PreTrainedConfig, encoder: MediaEncoder) -> None:
        self.family = encoder.family
        self.encoder = encoder
        self._config = config

    @property
    def sees_whole_images(self) -> bool:
        """Whether an image's tokens attend to each other in both directions, so that no chunk may end among them."""
        return self.family.sees_whole_images

    @property
    def rotates_in_grids(self) -> bool:
        """Whether rows are rotated by other positions than those that they stand at."""
        return self.family.rotates_in_grids

    def check(self, request: Request, most_at_once: int) -> None:
        """Refuse media that the model cannot have.

        Args:
            most_at_once: prompt tokens of a round.

        Raises:
            ValueError: one line that begins with the kind of the media.
        """
        kind, inputs = self.family.kind, self.family.inputs
        end = 0
        for one in request.media:
            if one.kind != kind or set(one.arrays) != set(inputs):
                raise ValueError(f"{one.kind} of {', '.join(one.arrays)}: {kind} of {', '.join(inputs)} is needed")
            if one.length != self.family.num_tokens(self._config, one.arrays):
                raise ValueError(f"{kind}: {one.length} tokens are not those of its arrays")
            self.encoder.check(one)
            if one.start < end or one.end >= len(request.prompt_token_ids):
                raise ValueError(f"{kind} overlaps another one, or is not followed by text")
            if self.sees_whole_images and one.length > most_at_once:
                raise ValueError(
                    f"{kind} of {one.length} tokens, and max_num_batched_tokens is {most_at_once}; raise it"
                )
            end = one.end

    def rows(self, chunks: Sequence[Chunk], starts: Sequence[int], device: torch.device) -> MediaRows | None:
        """Of chunks, whose first rows are `starts`; None where they hold no media."""
        within = [
            (one, start + first - chunk.start, first - one.start, last - one.start)
            for chunk, start in zip(chunks, starts, strict=True)
            for one, first, last in media_within(chunk)
        ]
        if not within:
            return None
        features = self.encoder.features(one for one, *_ in within)
        rows = np.concatenate([np.arange(row, row + last - first) for _, row, first, last in within])
        parts = [(features[one.digest], slice(first, last)) for one, _, first, last in within]
        embeddings = torch.cat([of.embeddings[part] for of, part in parts])
        depth = len(parts[0][0].deep)
        deep = tuple(torch.cat([of.deep[layer][part] for of, part in parts]) for layer in range(depth))
        return MediaRows(upload(rows, device), embeddings, deep)

    def tell(self, outcome: Outcome, chunks: list[PlacedMedia]) -> int:
        """Say to a drafter what of these is in a round's chunks; see `TellMedia`."""
        return tell(self.encoder, outcome, chunks)

    def visible(self, chunk: Chunk) -> Tensor | None:
        """Which of a chunk's rows each of them sees: bool [1, length, length]; None is causal."""
        if not self.sees_whole_images:
            return None
        spans = [(start - chunk.start, end - chunk.start) for _, start, end in media_within(chunk)]
        if not spans:
            return None
        seen = torch.ones(chunk.length, chunk.length, dtype=torch.bool).tril()
        for first, last in spans:
            seen[first:last, first:last] = True
        return seen[None]

    def rotated(self, positions: Tensor, chunks: Sequence[Chunk], starts: Sequence[int]) -> Tensor:
        """Positions [num_rows] by which rows are rotated: [1, num_rows], or [3, 1, num_rows] where images are among
        them.

        Args:
            positions: of the rows, moved as far as what is behind the images is.
        """
        with_images = [(chunk, start) for chunk, start in zip(chunks, starts, strict=True) if chunk.seq.request.media]
        if not with_images:
            return positions[None]
        thrice = positions.repeat(3, 1)
        for chunk, start in with_images:
            found = rotations(chunk.seq.request.media, chunk.start, chunk.start + chunk.length)
            thrice[:, start : start + chunk.length] = upload(found, positions.device)
        return thrice[:, None]


def media_within(chunk: Chunk) -> list[tuple[MediaInput, int, int]]:
    """Media with tokens in a chunk, and which: their first position, and the one behind the last."""
    end = chunk.start + chunk.length
    return [
        (one, max(one.start, chunk.start), min(one.end, end))
        for one in chunk.seq.request.media
        if one.start < end and one.end > chunk.start
    ]


class Media(Feature):
    """Media in prompts: rows that hold their embeddings, which tokens see each other, and how these are rotated."""

    kind = MediaRows

    def __init__(self, part: MediaPart, slots: SlotState, model: nn.Module, decoder_layers: nn.ModuleList) -> None:
        self.part, self.slots = part, slots
        self.model, self.decoder_layers = model, tuple(decoder_layers)

    def visible(self, chunk: Chunk) -> Tensor | None:
        """See `Feature.visible`."""
        return self.part.visible(chunk)

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """See `Feature.positions`; [3, 1, num_rows] where images are among the rows."""
        if not self.part.rotates_in_grids:
            return positions
        moved = positions[0] + self.slots.position_deltas[placed.slots]
        return self.part.rotated(moved, () if placed.plan is None else placed.plan.chunks, placed.starts)

    def column(self, placed: Placed) -> MediaRows | None:
        """See `Feature.column`."""
        if placed.plan is None:
            return None
        return self.part.rows(placed.plan.chunks, placed.starts, self.slots.device)

    @contextmanager
    def entered(self, column: MediaRows | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`: embeddings in their rows, and what is added to the results of the first layers."""
        if column is None:
            yield
            return
        rows = column.rows
        embeddings = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        inputs["inputs_embeds"] = embeddings.index_copy(1, rows, column.embeddings[None])

        def adding(features: Tensor) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
            return lambda module, args, hidden: hidden.index_add(1, rows, features[None])

        deep = zip(self.decoder_layers, column.deep, strict=False)
        hooks = [layer.register_forward_hook(adding(features)) for layer, features in deep]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
