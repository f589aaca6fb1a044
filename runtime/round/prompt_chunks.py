"""Prompt chunks as rows of a flattened batch: one segment per chunk, or one segment of equally long pieces."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.scheduler import Chunk

PIECE_ROWS = 32
"""Number of rows of a piece. A piece is one tile of the attention kernel, so that pieces and whole chunks are computed
in the same tiles."""


class ChunkRows(NamedTuple):
    """Rows of a round's prompt chunks: int64 numpy arrays on the host, or int64 tensors on a device.

    A piece is either a whole chunk (`side_by_side`) or `PIECE_ROWS` rows of a chunk (`in_pieces`). With `in_pieces`,
    the last piece of each chunk is padded.
    """

    token_ids: Tensor
    """[num_rows]"""
    positions: Tensor
    """[num_rows]"""
    stores: Tensor
    """[num_rows]: 1 if the row's keys and values are written to the KV cache, -1 if the row is a replay's, 0 for
    padding."""
    slots: Tensor
    """[num_pieces]"""
    contexts: Tensor
    """[num_pieces]: number of the sequence's tokens before the piece's first row."""
    real: Tensor
    """[num_chunk_tokens]: row number of each token of the chunks; rows that are not listed are padding."""
    wanted: Tensor
    """[n]: rows whose logits are needed: last rows of chunks that sample, then prompt tokens that are reported."""

    def to(self, device: torch.device) -> "ChunkRows":
        """Copies the fields to a device in one transfer."""
        return ChunkRows(*upload(np.concatenate(self), device).split([len(part) for part in self]))


def side_by_side(chunks: Sequence[Chunk]) -> ChunkRows:
    """Returns the chunks' rows without padding; each chunk is one piece."""
    lengths = np.array([chunk.length for chunk in chunks])
    starts = row_starts(chunks)
    contexts = np.array([chunk.start for chunk in chunks])
    real = np.arange(lengths.sum())
    return ChunkRows(
        token_ids=np.concatenate([_tokens(chunk) for chunk in chunks]),
        positions=real + np.repeat(contexts - starts, lengths),
        # A replay must not write KV: recomputed values may differ in their last bits, and the block may be shared.
        stores=np.repeat([-1 if chunk.replay else 1 for chunk in chunks], lengths),
        slots=np.array([chunk.seq.slot for chunk in chunks]),
        contexts=contexts,
        real=real,
        wanted=_wanted(chunks, starts),
    )


def in_pieces(chunks: Sequence[Chunk], last_position: int) -> ChunkRows:
    """Returns the chunks' rows in pieces of `PIECE_ROWS`; no KV is stored for padding rows.

    Args:
        last_position: last position that the model supports.
    """
    counts = np.array([-(-chunk.length // PIECE_ROWS) for chunk in chunks])
    of_chunk = np.repeat(np.arange(len(chunks)), counts)
    begins = (np.arange(len(of_chunk)) - (np.cumsum(counts) - counts)[of_chunk]) * PIECE_ROWS
    close, starts = side_by_side(chunks), row_starts(chunks, PIECE_ROWS)
    contexts = close.contexts[of_chunk] + begins
    real = close.real + np.repeat(np.array(starts) - row_starts(chunks), [chunk.length for chunk in chunks])
    num_rows = len(of_chunk) * PIECE_ROWS
    token_ids, stores = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    token_ids[real], stores[real] = close.token_ids, close.stores
    return ChunkRows(
        token_ids=token_ids,
        positions=np.minimum((contexts[:, None] + np.arange(PIECE_ROWS)).ravel(), last_position),
        stores=stores,
        slots=close.slots[of_chunk],
        contexts=contexts,
        real=real,
        wanted=_wanted(chunks, starts),
    )


def row_starts(chunks: Sequence[Chunk], multiple: int = 1) -> list[int]:
    """Returns the row of each chunk's first token; each chunk's length is rounded up to a multiple of `multiple`."""
    sizes = [-(-chunk.length // multiple) * multiple for chunk in chunks]
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def _tokens(chunk: Chunk) -> np.ndarray:
    return np.array(chunk.seq.token_ids[chunk.start : chunk.start + chunk.length], dtype=np.int64)


def _wanted(chunks: Sequence[Chunk], starts: list[int]) -> np.ndarray:
    rows = [start + chunk.length - 1 for chunk, start in zip(chunks, starts, strict=True) if chunk.samples]
    for chunk, start in zip(chunks, starts, strict=True):
        rows += range(start, start + len(chunk.prompt_targets()))
    return np.array(rows, np.int64)
