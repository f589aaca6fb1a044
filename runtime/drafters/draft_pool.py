"""The paged KV of a drafter: committed rows under the verifier's blocks, drafted ones behind them.

Drafted row n of a sequence is stored at index num_context + n of its table: what does not fit behind the committed rows
of its last block lies in private blocks, which one pass alone writes and reads. So nothing that another sequence may
share, and nothing that the verifier reserves, is ever touched by a draft.
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
    """Piece of a prompt, and where its rows are stored."""

    slot: int
    rows: slice
    """Among the rows of all chunks."""
    positions: Tensor
    """int64 [length]"""
    tables: Tensor
    """int64 [1, num_blocks], which hold the chunk and what is before it."""
    slot_mapping: Tensor
    """int64 [length]"""


class DraftPool:
    """Keys and values by layer, and whatever else is kept per row.

    Args:
        layers: attention shapes of the drafter's layers.
        num_drafted: most rows a sequence drafts in one pass.
        extra_sizes: widths of further tensors [num_blocks, block_size, size] under the same addresses.
    """

    def __init__(
        self,
        layers: list[LayerAttention],
        num_drafted: int,
        dtype: torch.dtype,
        device: torch.device,
        extra_sizes: tuple[int, ...] = (),
    ) -> None:
        self.layers = layers
        self.num_drafted = num_drafted
        self.dtype = dtype
        self.device = device
        self.block_size = 0
        self.num_private = 0
        self.num_slots = self.num_blocks = 0
        self.caches: list[tuple[Tensor, Tensor]] = [(torch.zeros(0), torch.zeros(0)) for _ in layers]
        self.extras: list[Tensor] = [torch.zeros(0) for _ in extra_sizes]
        self._extra_sizes = extra_sizes
        self._private = torch.zeros(0, 0, dtype=torch.int64)

    @property
    def token_bytes(self) -> int:
        """Bytes of a position in all tensors of the pool."""
        sizes = [layer.kv_size for layer in self.layers]
        return (sum(sizes) + sum(self._extra_sizes)) * self.dtype.itemsize

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> bool:
        """Make room, keeping what is stored; room is never given back: a later verifier may fit into it.

        Returns:
            False where there was room, and no address has changed.
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
        self.extras = [
            grown(old, (*rows, size), self.dtype, self.device)
            for old, size in zip(self.extras, self._extra_sizes, strict=True)
        ]
        private = torch.arange(self.num_blocks, rows[0], device=self.device)
        self._private = private.view(self.num_slots, self.num_private)
        return True

    def reaching(self, block_tables: Tensor, longest: int) -> Tensor:
        """The columns of block tables [n, max_blocks_per_seq] that sequences of `longest` rows at most have."""
        return block_tables[:, : max(-(-longest // self.block_size), 1)]

    def tables(self, block_tables: Tensor, num_context: Tensor) -> Tensor:
        """Block tables with private blocks behind each context.

        Args:
            block_tables: int64 [num_reqs, num_blocks] that hold all contexts, num_reqs at most num_slots.
            num_context: int64 [num_reqs]: rows that are committed.

        Returns:
            int64 [num_reqs, num_blocks and the private ones].
        """
        num_blocks = block_tables.shape[1]
        tables = F.pad(block_tables, (0, self.num_private))
        full = ((num_context + self.block_size - 1) // self.block_size).clamp(0, num_blocks)
        columns = full[:, None] + torch.arange(self.num_private, device=self.device)
        return tables.scatter_(1, columns, self._private[: len(tables)])

    def chunks(self, batch: DraftBatch) -> list[Chunk]:
        """Chunks of a batch."""
        chunks, begin = [], 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            positions = torch.arange(start, start + length, device=self.device)
            tables = self.reaching(batch.block_tables[slot : slot + 1], start + length)
            mapping = slot_mapping(tables, positions[None], self.block_size)[0]
            chunks.append(Chunk(slot, slice(begin, begin + length), positions, tables, mapping))
            begin += length
        return chunks

    def chunk_segment(self, chunk: Chunk, begin: int = 0) -> Segment:
        """Rows of a chunk, where those of all chunks begin at `begin`, with all rows before each."""
        return self.causal_segment(begin + chunk.rows.start, chunk.positions[None], chunk.positions[:1], chunk.tables)

    def causal_segment(self, start: int, rows: Tensor, num_context: Tensor, tables: Tensor) -> Segment:
        """New rows int64 [num_reqs, num_rows], stored behind the context, of which each sees those before it."""
        return Segment(start, *rows.shape, tables, num_context, rows)

    def tree_segment(self, rows: Tensor, visible: Tensor, num_context: Tensor, tables: Tensor) -> Segment:
        """Nodes of a tree that are the last of its nodes so far.

        Args:
            rows: int64 [num_reqs, num_nodes], logical positions (context + depth) of all nodes so far, as stored.
            visible: bool [num_reqs, num_query, num_nodes], nodes that each of the last num_query sees; or packed.
        """
        words = pack_mask(visible) if visible.dtype == torch.bool else visible
        return Segment(0, *visible.shape[:2], tables, num_context, rows, words)

    def attends(self, slot_mapping: Tensor, segments: list[Segment], scaling: float) -> list[Attend]:
        """Storage and attention of the same rows in every layer, by layer; arguments as `PagedAttend`'s."""
        return [PagedAttend(cache, slot_mapping, segments, scaling) for cache in self.caches]


class DraftedRows:
    """The rows of one growth, level by level: where they go, and what they see.

    Args:
        tables: int64 [num_reqs, num_blocks], with private blocks.
        num_context: int64 [num_reqs], contiguous: rows that all of these see, and behind which they are stored.
        num_levels: levels that are run.
        width: rows of a level.
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
        # A chain is causal: what was drafted before is context of what comes next.
        ahead = torch.arange(num_levels, device=num_context.device)[:, None] if width == 1 else 0
        self._num_context = (num_context + ahead).expand(num_levels, -1)

    def slot_mapping(self, level: Level) -> Tensor:
        """int64 [num_reqs * width]: where the level's rows are stored."""
        return self._slot_mapping[level.depth - 1]

    def positions(self, level: Level) -> Tensor:
        """int64 [num_reqs, width]: logical positions of the level's rows."""
        return self._positions[:, (level.depth - 1) * self.width : level.depth * self.width]

    def segment(self, level: Level) -> Segment:
        """Keys that the level's rows attend to, once the rows are stored."""
        num_context = self._num_context[level.depth - 1]
        if level.visible is None:
            return self.pool.causal_segment(0, self.positions(level), num_context, self.tables)
        return self.pool.tree_segment(
            self._positions[:, : level.depth * self.width], level.visible, num_context, self.tables
        )

    def attends(self, level: Level, scaling: float) -> list[Attend]:
        """Storage and attention of one level, by layer of the pool."""
        return self.pool.attends(self.slot_mapping(level), [self.segment(level)], scaling)


def grown(old: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero tensor of `shape` beginning with the rows of `old`, where they are alike; `old` itself if large enough."""
    same_rows = old.shape[1:] == shape[1:]
    if same_rows and old.shape[0] >= shape[0]:
        return old
    new = zeros(shape, dtype, device)
    if same_rows:
        new[: old.shape[0]] = old
    return new


def check_tree_shape(spec: ChannelSpec, num_nodes: int, max_path: int) -> None:
    """Refuse a channel made for other trees.

    Raises:
        ValueError: its nodes or paths are not those that this drafter grows.
    """
    if (spec.num_nodes, spec.max_path) != (num_nodes, max_path):
        raise ValueError(
            f"the channel carries trees of {spec.num_nodes} nodes and paths of {spec.max_path}: this drafter grows "
            f"{num_nodes} and {max_path}"
        )
