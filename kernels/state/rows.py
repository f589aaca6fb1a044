"""Rows of token trees for recurrences, paths through them, and what nodes add to a state."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.tree.reference import ancestor_mask


class TreeRows(NamedTuple):
    """How the nodes of some trees follow one another, and which states they follow."""

    slots: Tensor
    """int64 [num_reqs]: row of the states."""
    visible: Tensor
    """bool [num_reqs, num_nodes, num_nodes]: row node follows column node, or is it."""
    windows: Tensor
    """int64 [num_reqs, num_nodes, width]: the latest inputs of a convolution at each node, itself last, as indices of
    `width` inputs before the root and the nodes' behind these."""

    @classmethod
    def of(cls, slots: Tensor, parents: Tensor, max_depth: int, width: int) -> "TreeRows":
        """Rows of trees.

        Args:
            parents: int64 [num_reqs, num_nodes]: -1 for the root, and else below the node's own index.
            max_depth: of the deepest node.
            width: longest window of a convolution.
        """
        node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
        window = [node]
        for _ in range(width - 1):
            node = torch.where(node > 0, parents.gather(1, node.clamp(min=0)), node - 1)
            window.append(node)
        return cls(slots, ancestor_mask(parents, max_depth), torch.stack(window[::-1], dim=2) + width)


@dataclass(frozen=True)
class Path:
    """How far states go on, and where they are then stored: all are read before any is written."""

    slots: Tensor
    """int64 [num_ends]: rows of the states before."""
    rows: Tensor
    """int64 [num_ends, longest]: nodes, as rows of [num_reqs * num_nodes]."""
    num_tokens: Tensor
    """int64 [num_ends]: nodes that count; the others are any."""
    targets: Tensor
    """int64 [num_ends]: rows of the states behind them."""
    _latest: dict[int, Tensor] = field(default_factory=dict)

    def latest(self, length: int) -> Tensor:
        """int64 [num_ends, length]: the last inputs that count, among so many before the path and the path's."""
        if length not in self._latest:
            self._latest[length] = self.num_tokens[:, None] + torch.arange(length, device=self.slots.device)
        return self._latest[length]

    @cached_property
    def skipped(self) -> Tensor:
        """bool [num_ends, longest, 1]: nodes that do not count."""
        return (torch.arange(self.rows.shape[1], device=self.rows.device) >= self.num_tokens[:, None])[..., None]

    @cached_property
    def ends(self) -> Tensor:
        """int64 [num_ends, 1]: the last row that counts."""
        return self.rows.gather(1, (self.num_tokens - 1)[:, None])


class Added(NamedTuple):
    """Outer products, left times right, that nodes add to a recurrent state, and the decay up to each node."""

    left: Tensor
    """float32 [num_reqs, num_nodes, num_left_heads, rows]"""
    right: Tensor
    """float32 [num_reqs, num_nodes, num_right_heads, columns]"""
    decay: Tensor
    """float32 [num_reqs, num_nodes, num_heads]: log of the decay from the state up to the node, itself included."""
