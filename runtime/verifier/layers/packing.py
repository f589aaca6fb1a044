"""Trees of unequal sizes side by side in a batch: padding takes part in attention alone, and in no other layer.

On the CPU only, where a round's shapes may follow what was drafted.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_SAVED = 48
"""Padded nodes that a second group has to save: its own calls in every layer take as long as attention to so many."""


@dataclass(frozen=True)
class Tiles:
    """Rows of unequal trees as the tiles that attention works on, which are padded."""

    rows: Tensor
    """int64 [num_reqs, num_nodes]: row of each node; any row for padding."""
    nodes: Tensor
    """int64 [num_rows]: index of each row among the padded nodes."""
    _indices: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, real: Tensor) -> "Tiles":
        """Of the real nodes, bool [num_reqs, num_nodes], in their order."""
        flat = real.flatten()
        return cls((flat.cumsum(0) - 1).clamp_min(0).view(real.shape), flat.nonzero()[:, 0])

    def tile(self, query: Tensor, num_kv_heads: int) -> Tensor:
        """`tile_queries` of packed rows: [num_rows, num_heads, dim] -> tiles of the padded trees."""
        num_rows, num_heads, dim = query.shape
        num_reqs, num_nodes = self.rows.shape
        into, _ = self._of(num_heads)
        tiles = query.transpose(0, 1).reshape(num_heads * num_rows, dim).index_select(0, into)
        return tiles.view(num_reqs, num_kv_heads, num_heads // num_kv_heads * num_nodes, dim)

    def untile(self, tiles: Tensor) -> Tensor:
        """The way back from `tile`."""
        num_reqs, num_kv_heads, rows, dim = tiles.shape
        num_heads = num_kv_heads * rows // self.rows.shape[1]
        _, back = self._of(num_heads)
        return tiles.reshape(num_reqs * num_kv_heads * rows, dim).index_select(0, back).view(-1, num_heads, dim)

    def _of(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """Indices of tiles in [num_heads, num_rows] and of rows' heads in [num_reqs, num_heads, num_nodes].

        Made by the first layer that has so many heads; how they are grouped changes neither.
        """
        if num_heads not in self._indices:
            heads = torch.arange(num_heads)
            num_nodes = self.rows.shape[1]
            into = self.rows[:, None] + heads[:, None] * len(self.nodes)
            first = (self.nodes // num_nodes) * (num_heads * num_nodes) + self.nodes % num_nodes
            back = first[:, None] + heads * num_nodes
            self._indices[num_heads] = (into.flatten(), back.flatten())
        return self._indices[num_heads]


class Group(NamedTuple):
    """Sequences whose trees are padded to one width; their rows follow one another."""

    start: int
    """First row."""
    seqs: Tensor
    """int64 [num_reqs], among all sequences."""
    num_nodes: int
    tiles: Tiles | None
    """None where they are all as wide."""


class Packing(NamedTuple):
    """Where the nodes of padded trees lie as rows, group by group."""

    rows: Tensor
    """int64 [num_reqs, num_nodes]: row of each node; any row for padding."""
    nodes: Tensor
    """int64 [num_rows]: index of each row among the padded nodes."""
    groups: tuple[Group, ...]
    starts: Tensor | None = None
    """int64 [num_reqs + 1]: first row of each tree, where they follow one another as they are."""


def pack_rows(real: Tensor) -> Packing | None:
    """`pack` for attention that needs no padding: trees follow one another in their order, in no groups."""
    if bool(real.all()):
        return None
    flat = real.flatten()
    rows = (flat.cumsum(0) - 1).clamp_min(0).view(real.shape)
    starts = torch.nn.functional.pad(real.sum(dim=1).cumsum(0), (1, 0))
    return Packing(rows, flat.nonzero()[:, 0], (), starts)


def pack(real: Tensor) -> Packing | None:
    """Rows of the real nodes, bool [num_reqs, num_nodes], which come first in each tree.

    None where there is too little padding to be taken out.
    """
    num_reqs, num_nodes = real.shape
    sizes = real.sum(dim=1)
    lens = sizes.tolist()
    if not worth_packing(sum(lens), num_reqs * num_nodes):
        return None
    split = best_split(lens)
    of_group = (
        [torch.arange(num_reqs)]
        if split is None
        else [(sizes > split).nonzero()[:, 0], (sizes <= split).nonzero()[:, 0]]
    )
    groups, nodes, start = [], [], 0
    for seqs, width in zip(of_group, (max(lens), split), strict=False):
        within = real[seqs, :width]
        tiles = Tiles.of(within)
        own = tiles.nodes
        full = len(own) == within.numel()
        groups.append(Group(start, seqs, width, None if full else tiles))
        nodes.append(seqs[own // width] * num_nodes + own % width)
        start += len(own)
    order = torch.cat(nodes)
    rows = torch.zeros(num_reqs * num_nodes, dtype=torch.int64)
    rows[order] = torch.arange(start)
    return Packing(rows.view(num_reqs, num_nodes), order, tuple(groups))


def packed(padded: Tensor, packing: Packing | None) -> Tensor:
    """[num_reqs, num_nodes, ...] as rows of a batch, without the padding where it is taken out."""
    flat = padded.flatten(0, 1)
    return flat if packing is None else flat[packing.nodes]


def rows_of(nodes: Tensor, num_nodes: int, packing: Packing | None) -> Tensor:
    """Row of the batch of each node [num_reqs, n]; `num_nodes` of each padded tree."""
    if packing is not None:
        return packing.rows.gather(1, nodes)
    return nodes + torch.arange(len(nodes), device=nodes.device)[:, None] * num_nodes


def best_split(lens: list[int]) -> int | None:
    """Nodes up to which trees are padded by themselves, apart from larger ones; None where that saves too little."""
    longest, num_reqs = max(lens), len(lens)
    best, most = None, _LEAST_SAVED - 1
    for num_short, width in enumerate(sorted(lens), start=1):
        saved = num_short * (longest - width)
        if saved > most and num_short < num_reqs:
            best, most = width, saved
    return best


def worth_packing(num_rows: int, num_padded: int) -> bool:
    """Whether trees of unequal sizes are packed: a few rows are not worth the gathering in every layer."""
    return 8 * num_rows < 7 * num_padded
