"""Trees of unequal sizes side by side in a batch: padding takes part in attention alone, and in no other layer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the nodes of padded trees lie; on the CPU only, where a round's shapes may follow what was drafted."""

    rows: Tensor
    """int64 [num_reqs, num_nodes]: row of each node, counted from the segment's start; any row for padding."""
    nodes: Tensor
    """int64 [num_rows]: index of each row among the padded nodes."""
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def tile(self, query: Tensor, num_kv_heads: int) -> Tensor:
        """`kernels.attention.tile_queries` of packed rows: [num_rows, num_heads, dim] -> tiles of the padded trees."""
        num_rows, num_heads, dim = query.shape
        num_reqs, num_nodes = self.rows.shape
        into, _ = self._indices(num_heads)
        tiles = query.transpose(0, 1).reshape(num_heads * num_rows, dim).index_select(0, into)
        return tiles.view(num_reqs, num_kv_heads, num_heads // num_kv_heads * num_nodes, dim)

    def untile(self, tiles: Tensor) -> Tensor:
        """The way back from `tile`."""
        num_reqs, num_kv_heads, rows, dim = tiles.shape
        num_heads = num_kv_heads * rows // self.rows.shape[1]
        _, back = self._indices(num_heads)
        return tiles.reshape(num_reqs * num_kv_heads * rows, dim).index_select(0, back).view(-1, num_heads, dim)

    def _indices(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """Indices of tiles in [num_heads, num_rows] and of rows' heads in [num_reqs, num_heads, num_nodes].

        Made by the first layer that has so many heads; how they are grouped changes neither.
        """
        if num_heads not in self._tiles:
            heads = torch.arange(num_heads)
            num_nodes = self.rows.shape[1]
            into = self.rows[:, None] + heads[:, None] * len(self.nodes)
            first = (self.nodes // num_nodes) * (num_heads * num_nodes) + self.nodes % num_nodes
            back = first[:, None] + heads * num_nodes
            self._tiles[num_heads] = (into.flatten(), back.flatten())
        return self._tiles[num_heads]


def pack(real: Tensor) -> Packing | None:
    """Where the real nodes [num_reqs, num_nodes] lie side by side; None where padding is too little to be taken out."""
    flat = real.flatten()
    if not worth_packing(int(flat.sum()), len(flat)):
        return None
    return Packing((flat.cumsum(0) - 1).clamp_min(0).view(real.shape), flat.nonzero()[:, 0])


def packed(padded: Tensor, packing: Packing | None) -> Tensor:
    """[num_reqs, num_nodes, ...] as rows of a batch, without the padding where it is taken out."""
    flat = padded.flatten(0, 1)
    return flat if packing is None else flat[packing.nodes]


def rows_of(nodes: Tensor, num_nodes: int, packing: Packing | None) -> Tensor:
    """Row of the batch of each node [num_reqs, n]; `num_nodes` of each padded tree."""
    if packing is not None:
        return packing.rows.gather(1, nodes)
    return nodes + torch.arange(len(nodes), device=nodes.device)[:, None] * num_nodes


def worth_packing(num_rows: int, num_padded: int) -> bool:
    """Whether trees of unequal sizes are packed: taking them apart in every layer costs as much as a few rows."""
    return 8 * num_rows < 7 * num_padded
