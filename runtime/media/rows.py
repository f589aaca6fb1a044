"""Rows of a round that belong to images or audio: the rows' embeddings, the attention between the rows, and their RoPE
positions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.media.encoder import MediaEncoder
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.media.positions import rotations
from wingbeat.runtime.media.telling import tell
from wingbeat.runtime.protocol.chunk_inputs import PlacedChunk
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Feature, Placed
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.plan import Chunk
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.sequence import Sequence as Scheduled
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.model_part import SpanReader


class MediaRows(NamedTuple):
    """Rows of a flattened batch whose embeddings are replaced by media features."""

    rows: Tensor
    """Indices of the rows in the batch, int64 [num_media_rows]."""
    embeddings: Tensor
    """Embeddings of these rows, [num_media_rows, hidden_size]."""
    deep: tuple[Tensor, ...] = ()
    """`MediaFeatures.deep`, restricted to these rows."""


class MediaPart(SpanReader):
    """The media of one kind that a verifier accepts.

    Args:
        config: config of the whole model.
        loaded: the verifier; its attribute `model` is None if the verifier runs as a TensorRT engine.
    """

    name = "media"

    def __init__(self, config: PreTrainedConfig, encoder: MediaEncoder, loaded: LoadedModel) -> None:
        self.family = encoder.family
        self.encoder = encoder
        self.whole_spans = self.family.sees_whole_images
        self._config, self._loaded = config, loaded

    def feature(self, slots: SlotState, config: EngineConfig, blocks: BlockManager, cache: KVCache) -> "Media":
        """See `ModelPart.feature`."""
        return Media(self, slots, self._loaded.model, self._loaded.decoder_layers)

    def figures(self) -> dict[str, float]:
        """See `ModelPart.figures`; returns `EncoderFigures`."""
        return asdict(self.encoder.figures)

    def seconds(self) -> dict[str, float]:
        """See `ModelPart.seconds`."""
        return self.encoder.device_clock.seconds

    def channel_fields(self, width: int) -> dict[str, int]:
        """See `SpanReader.channel_fields`."""
        return {"embedding_width": width, "num_axes": 3 if self.family.rotates_in_grids else 0}

    def check(self, request: Request, most_at_once: int) -> None:
        """See `SpanReader.check`."""
        kind, inputs = self.family.kind, self.family.inputs
        end = 0
        for one in request.spans:
            if one.kind != kind or set(one.arrays) != set(inputs):
                raise ValueError(f"{one.kind} of {', '.join(one.arrays)}: {kind} of {', '.join(inputs)} is needed")
            if one.length != self.family.num_tokens(self._config, one.arrays):
                raise ValueError(f"{kind}: {one.length} placeholder tokens do not match the size of its arrays")
            self.encoder.check(one)
            if one.start < end or one.end >= len(request.prompt_token_ids):
                raise ValueError(f"{kind} overlaps another span, or is not followed by text")
            if one.whole is not self.whole_spans:
                raise ValueError(
                    f"{kind} is {'' if one.whole else 'not '}marked as whole, unlike the spans of this model"
                )
            if one.whole and one.length > most_at_once:
                raise ValueError(
                    f"{kind} of {one.length} tokens must fit into one round, and max_num_batched_tokens is "
                    f"{most_at_once}; raise it"
                )
            end = one.end

    def tell_inputs(self, outcome: Outcome, chunks: list[PlacedChunk]) -> int:
        """See `SpanReader.tell_inputs`."""
        return tell(self.encoder, outcome, chunks)


def embedded_rows(columns: Mapping[type, Any]) -> MediaRows | None:
    """Returns the rows of a batch that hold media; None if the batch has no media."""
    return columns.get(MediaRows)


def media_within(chunk: Chunk) -> list[tuple[MediaInput, int, int]]:
    """Returns the media with tokens in a chunk, each with the position of the first of these tokens and the position
    after the last.
    """
    end = chunk.start + chunk.length
    return [
        (one, max(one.start, chunk.start), min(one.end, end))
        for one in chunk.seq.request.spans
        if one.start < end and one.end > chunk.start
    ]


class Media(Feature):
    """Feature for media in prompts: replaces the embeddings of media tokens, determines which of these tokens see each
    other, and sets RoPE positions.
    """

    kind = MediaRows

    def __init__(self, part: MediaPart, slots: SlotState, model: nn.Module, decoder_layers: nn.ModuleList) -> None:
        self.part, self.slots = part, slots
        self.model, self.decoder_layers = model, tuple(decoder_layers)
        self._moved: dict[int, int] = {}
        """The entries of `SlotState.position_deltas` that are not 0, by slot."""

    def admit(self, seq: Scheduled) -> None:
        """See `Feature.admit`."""
        # RoPE position of a token after all media, minus the token's position in the sequence.
        delta = sum(one.shift for one in seq.request.spans)
        if delta != self._moved.get(seq.slot, 0):
            self._moved[seq.slot] = delta
            self.slots.move(seq.slot, delta)

    def visible(self, chunk: Chunk) -> Tensor | None:
        """See `Feature.visible`."""
        if not self.part.whole_spans:
            return None
        spans = [(start - chunk.start, end - chunk.start) for _, start, end in media_within(chunk)]
        if not spans:
            return None
        seen = torch.ones(chunk.length, chunk.length, dtype=torch.bool).tril()
        for first, last in spans:
            seen[first:last, first:last] = True
        return seen[None]

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """See `Feature.positions`; [3, 1, num_rows] if the rows include images."""
        if not self.part.family.rotates_in_grids:
            return positions
        positions = positions[0] + self.slots.position_deltas[placed.slots]
        chunks = () if placed.plan is None else placed.plan.chunks
        with_images = [pair for pair in zip(chunks, placed.starts, strict=True) if pair[0].seq.request.spans]
        if not with_images:
            return positions[None]
        thrice = positions.repeat(3, 1)
        for chunk, start in with_images:
            found = rotations(chunk.seq.request.spans, chunk.start, chunk.start + chunk.length)
            thrice[:, start : start + chunk.length] = upload(found, positions.device)
        return thrice[:, None]

    def column(self, placed: Placed) -> MediaRows | None:
        """See `Feature.column`; None if no chunk holds media."""
        within = [
            (one, start + first - chunk.start, first - one.start, last - one.start)
            for chunk, start in zip(placed.plan.chunks if placed.plan else (), placed.starts, strict=True)
            for one, first, last in media_within(chunk)
        ]
        if not within:
            return None
        features = self.part.encoder.features(one for one, *_ in within)
        rows = np.concatenate([np.arange(row, row + last - first) for _, row, first, last in within])
        parts = [(features[one.digest], slice(first, last)) for one, _, first, last in within]
        embeddings = torch.cat([of.embeddings[part] for of, part in parts])
        depth = len(parts[0][0].deep)
        deep = tuple(torch.cat([of.deep[layer][part] for of, part in parts]) for layer in range(depth))
        return MediaRows(upload(rows, self.slots.device), embeddings, deep)

    @contextmanager
    def entered(self, column: MediaRows | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`; replaces embeddings, and adds features to the outputs of the first layers."""
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
