"""Weights of many adapters side by side, and which of them each row of a batch has."""

from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 16
"""Rows of one adapter that a program of the GPU's kernels takes."""


class StackedAdapters(NamedTuple):
    """What all adapters do to one product, or to a few of the same inputs that lie side by side: its parts.

    Adapter `id`, from 1 on, lies at id - 1; 0 stands for none. One of a lower rank than there is room for has zeros
    behind it. Shapes and addresses never change.
    """

    a: Tensor
    """[num_adapters, inputs, num_parts * rank]"""
    b: Tensor
    """[num_adapters, rank, outputs of all parts], scaled, in the same dtype."""
    ranks: Tensor
    """int64 [num_adapters + 1] by id: 0 where an adapter leaves the product as it is."""
    parts: tuple[int, ...]
    """Outputs of each part."""

    @classmethod
    def empty(
        cls, num_adapters: int, rank: int, inputs: int, parts: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> "StackedAdapters":
        """Room for so many adapters of at most so high a rank; there is none yet."""
        a = torch.zeros(num_adapters, inputs, len(parts) * rank, dtype=dtype, device=device)
        b = torch.zeros(num_adapters, rank, sum(parts), dtype=dtype, device=device)
        return cls(a, b, torch.zeros(num_adapters + 1, dtype=torch.int64, device=device), parts)

    @property
    def rank(self) -> int:
        """The highest there is room for."""
        return self.b.shape[1]

    def part(self, index: int) -> "StackedAdapters":
        """Views of one part alone; it has the others' ranks."""
        begin, rank = sum(self.parts[:index]), self.rank
        a = self.a[:, :, index * rank : (index + 1) * rank]
        return StackedAdapters(a, self.b[:, :, begin : begin + self.parts[index]], self.ranks, (self.parts[index],))

    def put(self, adapter_id: int, part: int, a: Tensor, b: Tensor) -> None:
        """Write one part of an adapter that was cleared: a [rank, inputs] and b [outputs, rank], as files have them."""
        own, rank = self.part(part), len(a)
        own.a[adapter_id - 1, :, :rank] = a.t().to(own.a)
        own.b[adapter_id - 1, :rank] = b.t().to(own.b)
        self.ranks[adapter_id] = max(rank, int(self.ranks[adapter_id]))

    def clear(self, adapter_id: int) -> None:
        """Let an id stand for an adapter that leaves the product as it is."""
        if self.ranks[adapter_id]:
            self.ranks[adapter_id] = 0
            self.a[adapter_id - 1] = 0
            self.b[adapter_id - 1] = 0


class Tiles(NamedTuple):
    """Rows sorted by adapter, cut into tiles of one adapter each; as many of them for every batch of a size."""

    order: Tensor
    """int64 [num_rows]: rows, those without an adapter first."""
    ids: Tensor
    """int64 [num_tiles]: 0 for a tile that is not needed."""
    begins: Tensor
    """int64 [num_tiles]: its first place in `order`."""
    ends: Tensor
    """int64 [num_tiles]"""


def tiles_of(ids: Tensor, num_adapters: int) -> Tiles:
    """Tiles of rows by their adapters' ids, int64 [num_rows]; looks at nothing on the host."""
    order = ids.argsort(stable=True)
    counts = (ids[:, None] == torch.arange(1, num_adapters + 1, device=ids.device)).sum(dim=0)
    firsts = len(ids) - counts.sum() + counts.cumsum(0) - counts
    num_own = (counts + TILE_ROWS - 1) // TILE_ROWS
    ends = num_own.cumsum(0)
    tiles = torch.arange(-(-len(ids) // TILE_ROWS) + num_adapters, device=ids.device)
    index = torch.searchsorted(ends, tiles, right=True)
    is_one = index < num_adapters
    index = index.clamp_max(num_adapters - 1)
    begins = firsts[index] + (tiles - (ends - num_own)[index]) * TILE_ROWS
    stops = torch.minimum(begins + TILE_ROWS, (firsts + counts)[index])
    return Tiles(order, torch.where(is_one, index + 1, 0), begins, torch.where(is_one, stops, begins))


class AdapterRows(NamedTuple):
    """Which adapter each row of a forward pass has."""

    ids: Tensor
    """int64 [num_rows]; 0 is none."""
    runs: tuple[tuple[int, int, int], ...] | None = None
    """(id, begin, end) of rows that follow one another and have the same adapter; None where nobody looks at ids."""
    tiles: Tiles | None = None
    """Of those that nobody looks at."""

    @classmethod
    def of(cls, ids: Tensor, num_adapters: int, on_host: bool) -> "AdapterRows":
        """Of int64 [num_rows] on the device of the weights.

        Args:
            on_host: whether looking at them is no wait; else all shapes follow from the number of rows.
        """
        if not on_host:
            return cls(ids, tiles=tiles_of(ids, num_adapters))
        found, counts = torch.unique_consecutive(ids, return_counts=True)
        runs, begin = [], 0
        for adapter_id, count in zip(found.tolist(), counts.tolist(), strict=True):
            if adapter_id:
                runs.append((adapter_id, begin, begin + count))
            begin += count
        return cls(ids, tuple(runs))
