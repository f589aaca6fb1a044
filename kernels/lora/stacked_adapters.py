"""Stacked weights of many LoRA adapters, and the assignment of adapters to the rows of a batch."""

from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 16
"""Rows of one adapter that a GPU program processes."""


class StackedAdapters(NamedTuple):
    """Weights of all adapters for one matrix product, or for a few with the same inputs. Each product is a part.

    Ids begin at 1, and adapter `id` is stored at index id - 1; id 0 means no adapter. Adapters of a rank below the
    maximum are padded with zeros. Shapes and addresses never change.
    """

    a: Tensor
    """[num_adapters, inputs, num_parts * rank]."""
    b: Tensor
    """[num_adapters, rank, outputs of all parts], in the same dtype; includes the adapters' scaling."""
    ranks: Tensor
    """int64 [num_adapters + 1]: rank by id; 0 if an adapter does not change the product."""
    parts: tuple[int, ...]
    """Number of outputs of each part."""

    @classmethod
    def empty(
        cls, num_adapters: int, rank: int, inputs: int, parts: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> "StackedAdapters":
        """Allocates zeroed memory for `num_adapters` adapters of at most rank `rank`."""
        a = torch.zeros(num_adapters, inputs, len(parts) * rank, dtype=dtype, device=device)
        b = torch.zeros(num_adapters, rank, sum(parts), dtype=dtype, device=device)
        return cls(a, b, torch.zeros(num_adapters + 1, dtype=torch.int64, device=device), parts)

    @property
    def rank(self) -> int:
        """Maximum rank."""
        return self.b.shape[1]

    def part(self, index: int) -> "StackedAdapters":
        """Returns views of one part's weights; `ranks` is the same tensor for all parts."""
        begin, rank = sum(self.parts[:index]), self.rank
        a = self.a[:, :, index * rank : (index + 1) * rank]
        return StackedAdapters(a, self.b[:, :, begin : begin + self.parts[index]], self.ranks, (self.parts[index],))

    def put(self, adapter_id: int, part: int, a: Tensor, b: Tensor) -> None:
        """Writes one part of a cleared adapter: a [rank, inputs] and b [outputs, rank], the layout of adapter files."""
        own, rank = self.part(part), len(a)
        own.a[adapter_id - 1, :, :rank] = a.t().to(own.a)
        own.b[adapter_id - 1, :rank] = b.t().to(own.b)
        self.ranks[adapter_id] = max(rank, int(self.ranks[adapter_id]))

    def clear(self, adapter_id: int) -> None:
        """Sets an adapter's weights and rank to 0, so that the adapter does not change the product."""
        if self.ranks[adapter_id]:
            self.ranks[adapter_id] = 0
            self.a[adapter_id - 1] = 0
            self.b[adapter_id - 1] = 0


class Tiles(NamedTuple):
    """Rows sorted by adapter, cut into tiles of one adapter each.

    The number of tiles depends on the batch size only.
    """

    order: Tensor
    """int64 [num_rows]: row indices; rows without an adapter come first."""
    ids: Tensor
    """int64 [num_tiles]: adapter id of each tile; 0 for unused tiles."""
    begins: Tensor
    """int64 [num_tiles]: index in `order` of the tile's first row."""
    ends: Tensor
    """int64 [num_tiles]: index in `order` past the tile's last row."""


def tiles_of(ids: Tensor, num_adapters: int) -> Tiles:
    """Builds tiles from adapter ids, int64 [num_rows], without reading any value on the host."""
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
    """Adapter of each row of a forward pass."""

    ids: Tensor
    """int64 [num_rows]: adapter ids; 0 is none."""
    runs: tuple[tuple[int, int, int], ...] | None = None
    """(id, begin, end) of consecutive rows with the same adapter; None if ids are not read on the host."""
    tiles: Tiles | None = None
    """Tiles for kernels that read ids on the device; None if `runs` is given."""

    @classmethod
    def of(cls, ids: Tensor, num_adapters: int, on_host: bool) -> "AdapterRows":
        """Builds runs or tiles from adapter ids, int64 [num_rows], on the weights' device.

        Args:
            on_host: True if `ids` can be read without waiting for a device; builds runs. False builds tiles, whose
                shapes depend on the number of rows only.
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
