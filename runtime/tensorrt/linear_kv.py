"""Linear KV: every sequence has one row of each cache, as long as the longest sequence and the tree behind it.

An engine reads and writes rows alone. Pages beside them, where there are any, hold the same under block ids: what a
pass wrote is copied to its pages, and a row begins as a copy of pages that others filled. So blocks are shared, cached
and saved as without an engine, and each sequence still has its own row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import move_kv, pool_table, slot_mapping
from wingbeat.runtime.kv.pool import KVCache, LayerAttention


class Pages(NamedTuple):
    """Blocks beside rows; block 0 belongs to nobody."""

    num_blocks: int
    block_size: int


NO_PAGES = Pages(0, 1)


class LinearKV:
    """Keys and values [num_rows, kv_heads, capacity, dim] of every layer; row 0 belongs to nobody.

    Args:
        num_rows: sequences, and one.
        capacity: positions of a row.
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
        """Rows by layer."""
        self.pages: list[tuple[Tensor, Tensor]] = []
        """Keys and values by layer [num_blocks, block_size, kv_heads, dim]; none where there are no pages."""
        vectors: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for layer in layers:
            heads, dims = layer.num_kv_heads, (layer.key_dim, layer.value_dim)
            in_rows, in_pages = num_rows * heads * capacity, pages.num_blocks * heads * pages.block_size
            both = [torch.zeros(in_rows + in_pages, dim, dtype=dtype, device=device) for dim in dims]
            self.layers.append(tuple(part[:in_rows].view(num_rows, heads, capacity, -1) for part in both))
            if pages.num_blocks:
                # A head's positions lie side by side here too: the view has them as pools do.
                shape = (pages.num_blocks, heads, pages.block_size, -1)
                self.pages.append(tuple(part[in_rows:].view(shape).transpose(1, 2) for part in both))
            # To the kernel that moves rows, each head of each position is a block of its own.
            vectors.setdefault(heads, []).append(tuple(part[:, None, None] for part in both))
        self._vectors = [(heads, views, pool_table(views)) for heads, views in vectors.items()]
        self._steps = torch.arange(capacity, device=device)

    def rows(self, begin: int, end: int) -> list[Tensor]:
        """Keys and values of each layer in turn, of the rows from `begin` up to `end`."""
        return [cache[begin:end] for pair in self.layers for cache in pair]

    def shift(self, from_places: Tensor, to_places: Tensor) -> None:
        """Copy within rows: places int64 [n, m] are row * capacity + position; see `move_kv` for what may overlap."""
        for heads, views, table in self._vectors:
            move_kv(views, self._in_rows(from_places, heads), self._in_rows(to_places, heads), table)

    def shift_pages(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy within pages: slots int64 [n, m] are block id * block_size + offset."""
        if self.pages:
            for heads, views, table in self._vectors:
                move_kv(views, self._in_pages(from_slots, heads), self._in_pages(to_slots, heads), table)

    def fill(self, row: Tensor, block_table: Tensor, num_positions: int) -> None:
        """Bring the first positions of a row, int64 [1], from the pages of a table, int64 [1, num_table_blocks]."""
        if self.pages and num_positions:
            positions = self._steps[None, :num_positions]
            slots = slot_mapping(block_table, positions, self.page_shape.block_size)
            self._copy(slots.t(), row * self.capacity + positions.t(), into_pages=False)

    def keep(self, rows: Tensor, starts: Tensor, slots: Tensor) -> None:
        """Copy what a pass wrote to its pages.

        Args:
            rows, starts: int64 [n], of each sequence, and where its first position is.
            slots: int64 [n, num_positions]: where each position belongs; those in block 0 belong nowhere.
        """
        if self.pages:
            positions = starts[:, None] + self._steps[: slots.shape[1]]
            places = rows[:, None] * self.capacity + positions
            self._copy(slots.reshape(-1, 1), places.view(-1, 1), into_pages=True)

    def take_over(self, other: "LinearKV") -> None:
        """Begin as a smaller one of the same layers is."""
        for new, old in ((self.layers, other.layers), (self.pages, other.pages)):
            for new_pair, old_pair in zip(new, old, strict=False):
                for part, before in zip(new_pair, old_pair, strict=True):
                    part[: len(before)] = before

    def _copy(self, slots: Tensor, places: Tensor, into_pages: bool) -> None:
        for heads, views, table in self._vectors:
            ends = self._in_pages(slots, heads), self._in_rows(places, heads)
            move_kv(views, *(ends[::-1] if into_pages else ends), table)

    def _in_rows(self, places: Tensor, heads: int) -> Tensor:
        """[n, m] -> [n, m * heads]: vectors of all heads."""
        return self._by_heads(places // self.capacity, places % self.capacity, heads, self.capacity)

    def _in_pages(self, slots: Tensor, heads: int) -> Tensor:
        """[n, m] -> [n, m * heads], likewise."""
        size = self.page_shape.block_size
        return self.num_rows * heads * self.capacity + self._by_heads(slots // size, slots % size, heads, size)

    def _by_heads(self, block: Tensor, offset: Tensor, heads: int, size: int) -> Tensor:
        of_heads = block[..., None] * heads + torch.arange(heads, device=block.device)
        return (of_heads * size + offset[..., None]).flatten(-2)


class RowCache(KVCache):
    """The verifier's rows under the block ids that the engine's bookkeeping has.

    Args:
        linear: rows of all slots, with pages or without.
        blocks: what block ids say; without pages each sequence has one block.
    """

    def __init__(self, linear: LinearKV, blocks: Pages, block_bytes: int) -> None:
        self.linear = linear
        self.num_blocks, self.block_size = blocks
        self.block_bytes = block_bytes
        self.layers = linear.pages or linear.layers
        self._home = torch.zeros(blocks.num_blocks, dtype=torch.int64, device=linear.layers[0][0].device)
        """By block, where its first position is in its sequence's row: row * capacity + position."""

    def place(self, rows: Tensor, block_tables: Tensor, starts: Tensor, num_positions: int) -> None:
        """Note where the blocks are that a pass writes: the only ones in which paths are compacted, and never shared.

        Args:
            rows, starts: int64 [n], of each sequence, and where its first position is.
            block_tables: int64 [n, num_table_blocks]; behind what is written they may have blocks of others.
            num_positions: of each.
        """
        begins = torch.arange(block_tables.shape[1], device=rows.device) * self.block_size
        first, end = starts[:, None] - self.block_size, starts[:, None] + num_positions
        written = torch.where((begins > first) & (begins < end), block_tables, 0)
        self._home[written] = rows[:, None] * self.linear.capacity + begins
        self._home[0] = 0

    def own_pools(self) -> None:
        """None: a sequence's positions lie in its row, by head."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Compact accepted paths, in rows and in pages; see `KVCache.move`."""
        self.linear.shift(self._places(from_slots), self._places(to_slots))
        self.linear.shift_pages(from_slots, to_slots)

    def _places(self, slots: Tensor) -> Tensor:
        return self._home[slots // self.block_size] + slots % self.block_size
