"""Paged KV cache of a drafter: committed rows under the verifier's block ids, then drafted rows.

Drafted row n of a sequence is stored at index num_context + n of its block table. Rows beyond the last committed block
go into private blocks, which only the current pass writes and reads. A draft therefore never touches a block that
another sequence may share or that the verifier reserves.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import Level
from wingbeat.runtime.drafters.paged_attend import PagedAttend
from wingbeat.runtime.heads.contract import Attend
from wingbeat.runtime.kv.pool import LayerAttention, zeros
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.round.rows import Segment


class Chunk(NamedTuple):
    """A piece of a prompt, and the addresses at which its rows are stored."""

    slot: int
    rows: slice
    """Range of the chunk's rows among the rows of all chunks."""
    positions: Tensor
    """int64 [length]"""
    tables: Tensor
    """int64 [1, num_blocks]: blocks that hold the chunk and all rows before it."""
    slot_mapping: Tensor
    """int64 [length]"""


class DraftPool:
    """Key and value caches by layer.

    Args:
        layers: attention shapes of the drafter's layers.
        num_drafted: maximum number of rows that a sequence drafts in one pass.
    """

    def __init__(
        self, layers: list[LayerAttention], num_drafted: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.num_drafted = num_drafted
        self.dtype = dtype
        self.device = device
        self.block_size = 0
        self.num_private = 0
        self.num_slots = self.num_blocks = 0
        self.caches: list[tuple[Tensor, Tensor]] = [(torch.zeros(0), torch.zeros(0)) for _ in layers]
        self._private = torch.zeros(0, 0, dtype=torch.int64)

    @property
    def token_bytes(self) -> int:
        """Bytes per position over all tensors of the pool."""
        return sum(layer.kv_size for layer in self.layers) * self.dtype.itemsize

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> bool:
        """Grow the pool, keeping stored rows. The pool never shrinks, since a later verifier may use the memory.

        Returns:
            False if the pool was large enough and no address has changed.
        """
        known = self.num_blocks if spec.block_size == self.block_size else 0
        room = (spec.block_size, max(num_slots, self.num_slots), max(num_blocks, known))
        if room == (self.block_size, self.num_slots, self.num_blocks):
            return False
        self.block_size, self.num_slots, self.num_blocks = room
        self.num_private = -(-self.num_drafted // self.block_size)
        rows = (self.num_blocks + self.num_slots * self.num_private, self.block_size)
        self.caches = [
            tuple(
                grown(old, (*rows, layer.num_kv_heads, size), self.dtype, self.device)
                for old, size in zip(pair, (layer.key_dim, layer.value_dim), strict=True)
            )
            for pair, layer in zip(self.caches, self.layers, strict=True)
        ]
        private = torch.arange(self.num_blocks, rows[0], device=self.device)
        self._private = private.view(self.num_slots, self.num_private)
        return True

    def table_columns(self, block_tables: Tensor, longest: int) -> Tensor:
        """Return the columns of block tables [n, max_blocks_per_seq] that sequences of at most `longest` rows need."""
        return block_tables[:, : max(-(-longest // self.block_size), 1)]

    def tables(self, block_tables: Tensor, num_context: Tensor) -> Tensor:
        """Return block tables with each sequence's private blocks inserted after the sequence's context.

        Args:
            block_tables: int64 [num_reqs, num_blocks], covering all contexts; num_reqs is at most num_slots.
            num_context: int64 [num_reqs]: number of committed rows.

        Returns:
            int64 [num_reqs, num_blocks + num_private].
        """
        num_blocks = block_tables.shape[1]
        tables = F.pad(block_tables, (0, self.num_private))
        full = ((num_context + self.block_size - 1) // self.block_size).clamp(0, num_blocks)
        columns = full[:, None] + torch.arange(self.num_private, device=self.device)
        return tables.scatter_(1, columns, self._private[: len(tables)])

    def chunks(self, batch: DraftBatch) -> list[Chunk]:
        """Return the chunks of a batch with their positions, block tables and slot mappings."""
        chunks, begin = [], 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            positions = torch.arange(start, start + length, device=self.device)
            tables = self.table_columns(batch.block_tables[slot : slot + 1], start + length)
            mapping = slot_mapping(tables, positions[None], self.block_size)[0]
            chunks.append(Chunk(slot, slice(begin, begin + length), positions, tables, mapping))
            begin += length
        return chunks

    def chunk_segment(self, chunk: Chunk, begin: int = 0) -> Segment:
        """Return a causal attention segment of a chunk; the batch's chunk rows start at row `begin`."""
        return self.causal_segment(begin + chunk.rows.start, chunk.positions[None], chunk.positions[:1], chunk.tables)

    def causal_segment(self, start: int, rows: Tensor, num_context: Tensor, tables: Tensor) -> Segment:
        """Return a causal segment of new rows, stored after the context.

        `rows` int64 [num_reqs, num_rows] are the rows' logical positions.
        """
        return Segment(start, *rows.shape, tables, num_context, rows)

    def tree_segment(self, rows: Tensor, visible: Tensor, num_context: Tensor, tables: Tensor) -> Segment:
        """Return a segment of the latest nodes of a growing tree.

        Args:
            rows: int64 [num_reqs, num_nodes], logical positions (context + depth) of all nodes so far, in storage
                order.
            visible: bool [num_reqs, num_query, num_nodes], which nodes each of the last num_query nodes sees; or the
                same mask packed into words.
        """
        words = pack_mask(visible) if visible.dtype == torch.bool else visible
        return Segment(0, *visible.shape[:2], tables, num_context, rows, words)

    def attends(self, slot_mapping: Tensor, segments: list[Segment], scaling: float) -> list[Attend]:
        """Return a store-and-attend callable for each layer; all callables have the same rows.

        For the arguments see `PagedAttend`.
        """
        return [PagedAttend(cache, slot_mapping, segments, scaling) for cache in self.caches]


class DraftedRows:
    """Storage addresses and masks, level by level, of the rows that are drafted while trees grow.

    Args:
        tables: int64 [num_reqs, num_blocks], private blocks included.
        num_context: int64 [num_reqs], contiguous: number of committed rows, which all drafted rows see and after which
            the drafted rows are stored.
        num_levels: number of levels whose rows are run.
        width: rows per level and sequence.
    """

    def __init__(self, pool: DraftPool, tables: Tensor, num_context: Tensor, num_levels: int, width: int) -> None:
        self.pool = pool
        self.tables = tables
        self.width = width
        index = torch.arange(num_levels * width, device=num_context.device)
        self._positions = num_context[:, None] + index // width
        mapping = slot_mapping(tables, num_context[:, None] + index, pool.block_size)
        by_level = mapping.unflatten(1, (num_levels, width)).transpose(0, 1)
        self._slot_mapping = by_level.reshape(num_levels, len(mapping) * width).contiguous()
        # A chain is causal, so rows drafted at earlier levels count as context of later levels.
        ahead = torch.arange(num_levels, device=num_context.device)[:, None] if width == 1 else 0
        self._num_context = (num_context + ahead).expand(num_levels, -1)

    def slot_mapping(self, level: Level) -> Tensor:
        """Return the addresses at which the level's rows are stored, int64 [num_reqs * width]."""
        return self._slot_mapping[level.depth - 1]

    def positions(self, level: Level) -> Tensor:
        """Return the logical positions of the level's rows, int64 [num_reqs, width]."""
        return self._positions[:, (level.depth - 1) * self.width : level.depth * self.width]

    def segment(self, level: Level) -> Segment:
        """Return the attention segment of the level's rows; valid once the rows are stored."""
        num_context = self._num_context[level.depth - 1]
        if level.visible is None:
            return self.pool.causal_segment(0, self.positions(level), num_context, self.tables)
        return self.pool.tree_segment(
            self._positions[:, : level.depth * self.width], level.visible, num_context, self.tables
        )

    def attends(self, level: Level, scaling: float) -> list[Attend]:
        """Return the store-and-attend callables of one level, one per layer of the pool."""
        return self.pool.attends(self.slot_mapping(level), [self.segment(level)], scaling)


def grown(old: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zero tensor of `shape` that starts with the rows of `old` if row shapes match.

    Returns `old` itself if `old` is large enough.
    """
    same_rows = old.shape[1:] == shape[1:]
    if same_rows and old.shape[0] >= shape[0]:
        return old
    new = zeros(shape, dtype, device)
    if same_rows:
        new[: old.shape[0]] = old
    return new


def check_tree_shape(spec: ChannelSpec, num_nodes: int, max_path: int) -> None:
    """Check that a channel carries trees of the drafter's shape.

    Raises:
        ValueError: the channel's number of nodes or maximum path length differs.
    """
    if (spec.num_nodes, spec.max_path) != (num_nodes, max_path):
        raise ValueError(
            f"the channel carries trees of {spec.num_nodes} nodes and paths of {spec.max_path}: this drafter grows "
            f"{num_nodes} nodes and paths of {max_path}"
        )
