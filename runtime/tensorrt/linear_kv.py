"""Linear KV: every sequence has one row of each cache, as long as the longest sequence and the tree behind it.

To the scheduler a row is one block: block ids are rows, and a block's offset is a position.
"""

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import move_kv, pool_table
from wingbeat.runtime.kv.pool import KVCache, LayerAttention


class LinearKV(KVCache):
    """Keys and values [num_rows, kv_heads, capacity, dim] of every layer; row 0 belongs to nobody.

    Args:
        num_rows: sequences, and one.
        capacity: rows of a sequence.
    """

    def __init__(
        self, layers: list[LayerAttention], num_rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size, self.num_blocks = capacity, num_rows
        self.block_bytes = capacity * sum(layer.kv_size for layer in layers) * dtype.itemsize
        self.layers: list[tuple[Tensor, Tensor]] = [
            tuple(
                torch.zeros(num_rows, layer.num_kv_heads, capacity, dim, dtype=dtype, device=device)
                for dim in (layer.key_dim, layer.value_dim)
            )
            for layer in layers
        ]
        self._by_heads: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for key, value in self.layers:
            # A head's positions lie side by side: to the kernel that moves rows, heads are blocks of one head each.
            views = tuple(cache.flatten(0, 1)[:, :, None] for cache in (key, value))
            self._by_heads.setdefault(key.shape[1], []).append(views)
        self.table = None
        self._tables = {heads: pool_table(views) for heads, views in self._by_heads.items()}

    def own_pools(self) -> None:
        """None: a position is a row of each head."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Compact accepted paths; see `KVCache.move`."""
        for heads, views in self._by_heads.items():
            source, target = (self._per_head(slots, heads) for slots in (from_slots, to_slots))
            move_kv(views, source, target, self._tables[heads])

    def rows(self, begin: int, end: int) -> list[Tensor]:
        """Keys and values of each layer in turn, of the rows from `begin` up to `end`."""
        return [cache[begin:end] for pair in self.layers for cache in pair]

    def _per_head(self, slots: Tensor, heads: int) -> Tensor:
        """Addresses [n, m] of positions -> [n, m * heads] of the same positions of every head."""
        row, position = slots // self.block_size, slots % self.block_size
        blocks = row[..., None] * heads + torch.arange(heads, device=slots.device)
        return (blocks * self.block_size + position[..., None]).flatten(-2)
