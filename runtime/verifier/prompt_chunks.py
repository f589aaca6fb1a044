"""Prompt chunks as rows of a flattened batch: one segment each on a host, and one segment of them all elsewhere."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from wingbeat.runtime.scheduling.scheduler import Chunk

PIECE_ROWS = 32
"""Rows of a piece: a tile of the attention kernel, so that pieces of a chunk read what its tiles would."""


class ChunkRows(NamedTuple):
    """The rows of a round's chunks, behind its decodes."""

    positions: np.ndarray
    """int64 [num_rows]"""
    token_ids: np.ndarray
    """int64 [num_rows]"""
    stores: np.ndarray
    """int64 [num_rows]: 1 where keys and values are stored, else 0."""
    real: np.ndarray
    """int64 [num_chunk_tokens]: row of each token; the others are padding."""
    starts: list[int]
    """By chunk: row of its first token."""

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return len(self.positions)

    def logits_rows(self, chunks: Sequence[Chunk], begin: int) -> list[int]:
        """Rows of the flattened batch whose logits are needed: of chunks that sample, then of reported prompt tokens.

        Args:
            begin: of the chunks' first row.
        """
        rows = [begin + start + chunk.length - 1 for chunk, start in self._pairs(chunks) if chunk.samples]
        for chunk, start in self._pairs(chunks):
            rows += range(begin + start, begin + start + len(chunk.prompt_targets()))
        return rows

    def _pairs(self, chunks: Sequence[Chunk]) -> zip:
        return zip(chunks, self.starts, strict=True)


class ChunkPieces(NamedTuple):
    """Chunks cut into pieces of `PIECE_ROWS`, of which the last of each chunk is padded."""

    rows: ChunkRows
    slots: np.ndarray
    """int64 [num_pieces]"""
    contexts: np.ndarray
    """int64 [num_pieces]: tokens before the first row."""


class Pieces(NamedTuple):
    """Pieces of `PIECE_ROWS` on a device; fields as in `ChunkRows` and `ChunkPieces`."""

    token_ids: Tensor
    positions: Tensor
    stores: Tensor
    slots: Tensor
    contexts: Tensor


def side_by_side(chunks: Sequence[Chunk]) -> ChunkRows:
    """The chunks' rows without padding."""
    ends = np.cumsum([chunk.length for chunk in chunks])
    positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])
    token_ids = np.concatenate([_tokens(chunk) for chunk in chunks])
    # A replay reads the KV that stands; writing it again could change a shared block's last bits.
    stores = np.repeat([not chunk.replay for chunk in chunks], [chunk.length for chunk in chunks]).astype(np.int64)
    return ChunkRows(positions, token_ids, stores, np.arange(ends[-1]), [0, *ends[:-1].tolist()])


def in_pieces(chunks: Sequence[Chunk], last_position: int) -> ChunkPieces:
    """The chunks' rows in pieces; of the padding nothing is stored.

    Args:
        last_position: that the model has.
    """
    counts = np.array([-(-chunk.length // PIECE_ROWS) for chunk in chunks])
    first = np.cumsum(counts) - counts
    of_chunk = np.repeat(np.arange(len(chunks)), counts)
    begins = (np.arange(len(of_chunk)) - first[of_chunk]) * PIECE_ROWS
    contexts = np.array([chunk.start for chunk in chunks])[of_chunk] + begins
    close = side_by_side(chunks)
    starts = (first * PIECE_ROWS).tolist()
    lengths = [chunk.length for chunk in chunks]
    real = close.real + np.repeat(np.array(starts) - np.array(close.starts), lengths)
    num_rows = len(of_chunk) * PIECE_ROWS
    positions = np.minimum((contexts[:, None] + np.arange(PIECE_ROWS)).ravel(), last_position)
    token_ids, stores = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    token_ids[real], stores[real] = close.token_ids, close.stores
    slots = np.array([chunk.seq.slot for chunk in chunks])[of_chunk]
    return ChunkPieces(ChunkRows(positions, token_ids, stores, real, starts), slots, contexts)


def _tokens(chunk: Chunk) -> np.ndarray:
    return np.array(chunk.seq.token_ids[chunk.start : chunk.start + chunk.length], dtype=np.int64)
