"""Sends drafters the RoPE positions and the embeddings of images and audio in a prompt's chunks."""

import numpy as np
from torch import Tensor

from wingbeat.runtime.media.encoder import MediaEncoder
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.media.positions import rotations
from wingbeat.runtime.protocol.chunk_inputs import PlacedChunk
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.protocol.transfer import copy_into, upload


def tell(encoder: MediaEncoder, outcome: Outcome, chunks: list[PlacedChunk]) -> int:
    """Writes `Outcome.inputs` if the channel has memory for inputs; see `TellInputs`.

    A pair at position i contains the token at i + 1. The tokens of a chunk's pairs are therefore the range that begins
    and ends one token later than the chunk.
    """
    within = [_within(chunk) for chunk in chunks]
    before = any(chunk.spans and chunk.start + 1 < chunk.spans[-1].end for chunk in chunks)
    with_axes, with_embeddings = outcome.chunk_axes.shape[1] > 0, outcome.chunk_embeddings.shape[1] > 0
    if not before or not (with_axes or with_embeddings):
        return 0
    if with_axes:
        axes = [rotations(chunk.spans, chunk.start + 1, chunk.start + chunk.length + 1) - 1 for chunk in chunks]
        _write(outcome.chunk_axes, np.concatenate(axes, axis=1).T)
    if with_embeddings:
        _embed(encoder, outcome, chunks, within)
    return 1


def _within(chunk: PlacedChunk) -> list[tuple[MediaInput, int, int]]:
    """Returns the media with tokens in a chunk's pairs, each with the position of the first of these tokens and the
    position after the last.
    """
    begin, end = chunk.start + 1, chunk.start + chunk.length + 1
    return [
        (one, max(one.start, begin), min(one.end, end)) for one in chunk.spans if one.start < end and one.end > begin
    ]


def _embed(
    encoder: MediaEncoder,
    outcome: Outcome,
    chunks: list[PlacedChunk],
    within: list[list[tuple[MediaInput, int, int]]],
) -> None:
    features = encoder.features((one for media in within for one, *_ in media), counted=False)
    shown, begin = np.zeros(sum(chunk.length for chunk in chunks), dtype=np.int64), 0
    for chunk, media in zip(chunks, within, strict=True):
        for one, first, last in media:
            rows = slice(begin + first - chunk.start - 1, begin + last - chunk.start - 1)
            shown[rows] = 1
            copy_into(
                outcome.chunk_embeddings[rows],
                features[one.digest].embeddings[first - one.start : last - one.start],
            )
        begin += chunk.length
    _write(outcome.chunk_shown, shown)


def _write(target: Tensor, values: np.ndarray) -> None:
    copy_into(target[: len(values)], upload(values, target.device))
