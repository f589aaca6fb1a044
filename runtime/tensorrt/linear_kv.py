"""Linear KV: each sequence has one row of every cache, as long as the longest sequence plus a tree.

An engine reads and writes rows only. Optional pages hold the same data by block id: the KV that a pass wrote to rows is
copied to pages, and the row of a new sequence is filled from pages that were written for other sequences. Blocks can
therefore be shared, cached and saved in the same way as without an engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import move_kv, pool_table, slot_mapping
from wingbeat.runtime.kv.pool import KVCache, LayerAttention


class Pages(NamedTuple):
    """Number of blocks and tokens per block of the pages; block 0 is unused padding."""

    num_blocks: int
    block_size: int


NO_PAGES = Pages(0, 1)


class LinearKV:
    """Keys and values [num_rows, kv_heads, capacity, dim] of each layer; row 0 is unused padding.

    Args:
        layers: attention shapes of the layers.
        num_rows: number of sequences plus 1.
        capacity: positions of a row.
        dtype, device: dtype and device of the caches.
        pages: shape of the pages.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: Pages = NO_PAGES,
    ) -> None:
        self.num_rows, self.capacity, self.page_shape = num_rows, capacity, pages
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Key and value rows by layer."""
        self.pages: list[tuple[Tensor, Tensor]] = []
        """Key and value pages by layer [num_blocks, block_size, kv_heads, dim]; empty without pages."""
        vectors: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for layer in layers:
            heads, dims = layer.num_kv_heads, (layer.key_dim, layer.value_dim)
            in_rows, in_pages = num_rows * heads * capacity, pages.num_blocks * heads * pages.block_size
            both = [torch.zeros(in_rows + in_pages, dim, dtype=dtype, device=device) for dim in dims]
            self.layers.append(tuple(part[:in_rows].view(num_rows, heads, capacity, -1) for part in both))
            if pages.num_blocks:
                # In memory, pages store a head's positions contiguously, as rows do. The transposed view has the axis
                # order of a KV pool.
                shape = (pages.num_blocks, heads, pages.block_size, -1)
                self.pages.append(tuple(part[in_rows:].view(shape).transpose(1, 2) for part in both))
            # For the kernel that moves KV, each head's vector at each position is a separate block.
            vectors.setdefault(heads, []).append(tuple(part[:, None, None] for part in both))
        self._vectors = [(heads, views, pool_table(views)) for heads, views in vectors.items()]
        self._steps = torch.arange(capacity, device=device)

    def rows(self, begin: int, end: int) -> list[Tensor]:
        """Key and value rows of each layer in turn, from row `begin` up to but excluding `end`."""
        return [cache[begin:end] for pair in self.layers for cache in pair]

    def shift(self, from_places: Tensor, to_places: Tensor) -> None:
        """Copy KV within rows. Sources and destinations int64 [n, m] are row * capacity + position; see `move_kv` for
        permitted overlap.
        """
        for heads, views, table in self._vectors:
            move_kv(views, self._in_rows(from_places, heads), self._in_rows(to_places, heads), table)

    def shift_pages(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy KV within pages. Sources and destinations int64 [n, m] are block id * block_size + offset."""
        if self.pages:
            for heads, views, table in self._vectors:
                move_kv(views, self._in_pages(from_slots, heads), self._in_pages(to_slots, heads), table)

    def fill(self, row: Tensor, block_table: Tensor, num_positions: int) -> None:
        """Copy the KV of a sequence's first `num_positions` positions from pages to a row.

        Args:
            row: int64 [1], the sequence's row.
            block_table: int64 [1, num_table_blocks], block ids of the sequence's pages.
            num_positions: number of positions.
        """
        if self.pages and num_positions:
            positions = self._steps[None, :num_positions]
            slots = slot_mapping(block_table, positions, self.page_shape.block_size)
            self._copy(slots.t(), row * self.capacity + positions.t(), into_pages=False)

    def keep(self, rows: Tensor, starts: Tensor, slots: Tensor) -> None:
        """Copy the KV that a pass wrote from rows to pages.

        Args:
            rows, starts: int64 [n]: row of each sequence, and its first position that was written.
            slots: int64 [n, num_positions]: page address of each position; positions in block 0 are padding.
        """
        if self.pages:
            positions = starts[:, None] + self._steps[: slots.shape[1]]
            places = rows[:, None] * self.capacity + positions
            self._copy(slots.reshape(-1, 1), places.view(-1, 1), into_pages=True)

    def take_over(self, other: "LinearKV") -> None:
        """Copy the content of a smaller `LinearKV` of the same layers."""
        for new, old in ((self.layers, other.layers), (self.pages, other.pages)):
            for new_pair, old_pair in zip(new, old, strict=False):
                for part, before in zip(new_pair, old_pair, strict=True):
                    part[: len(before)] = before

    def _copy(self, slots: Tensor, places: Tensor, into_pages: bool) -> None:
        for heads, views, table in self._vectors:
            ends = self._in_pages(slots, heads), self._in_rows(places, heads)
            move_kv(views, *(ends[::-1] if into_pages else ends), table)

    def _in_rows(self, places: Tensor, heads: int) -> Tensor:
        """Converts positions in rows [n, m] (row * capacity + position) to vector indices [n, m * heads]."""
        return self._by_heads(places // self.capacity, places % self.capacity, heads, self.capacity)

    def _in_pages(self, slots: Tensor, heads: int) -> Tensor:
        """Converts page addresses [n, m] (block id * block_size + offset) to vector indices [n, m * heads]."""
        size = self.page_shape.block_size
        return self.num_rows * heads * self.capacity + self._by_heads(slots // size, slots % size, heads, size)

    def _by_heads(self, block: Tensor, offset: Tensor, heads: int, size: int) -> Tensor:
        of_heads = block[..., None] * heads + torch.arange(heads, device=block.device)
        return (of_heads * size + offset[..., None]).flatten(-2)


class RowCache(KVCache):
    """The verifier's linear KV as a `KVCache`, which addresses KV by block id.

    Args:
        linear: rows of all slots, with or without pages.
        blocks: number and size of blocks; without pages each sequence has one block.
        block_bytes: bytes of a block.
    """

    def __init__(self, linear: LinearKV, blocks: Pages, block_bytes: int) -> None:
        self.linear = linear
        self.num_blocks, self.block_size = blocks
        self.block_bytes = block_bytes
        self.layers = self.tensors = linear.pages or linear.layers
        self._stored = []  # rows are not a pool of blocks
        self._home = torch.zeros(blocks.num_blocks, dtype=torch.int64, device=linear.layers[0][0].device)
        """Address in the rows of each block's first position, int64 [num_blocks]: row * capacity + position."""

    def place(self, rows: Tensor, block_tables: Tensor, starts: Tensor, num_positions: int) -> None:
        """Record the row addresses of the blocks that a pass writes. Only blocks that a pass wrote are compacted later.
        Such a block belongs to a single sequence, so it has a single address.

        Args:
            rows, starts: int64 [n]: row of each sequence, and its first position that is written.
            block_tables: int64 [n, num_table_blocks]; entries after the written blocks may belong to other sequences.
            num_positions: number of positions written per sequence.
        """
        begins = torch.arange(block_tables.shape[1], device=rows.device) * self.block_size
        first, end = starts[:, None] - self.block_size, starts[:, None] + num_positions
        written = torch.where((begins > first) & (begins < end), block_tables, 0)
        self._home[written] = rows[:, None] * self.linear.capacity + begins
        self._home[0] = 0

    def own_pools(self) -> None:
        """Returns None, because a sequence's positions are stored in its row, head by head, not in a pool of blocks."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Compact accepted paths in rows and pages; see `KVCache.move`."""
        self.linear.shift(self._places(from_slots), self._places(to_slots))
        self.linear.shift_pages(from_slots, to_slots)

    def _places(self, slots: Tensor) -> Tensor:
        return self._home[slots // self.block_size] + slots % self.block_size
