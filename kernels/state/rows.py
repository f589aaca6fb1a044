"""Rows of draft trees for recurrences, accepted paths, and the nodes' additions to a state."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels.tree.reference import ancestor_mask


class TreeRows(NamedTuple):
    """Ancestry of the nodes of some trees, and the states that they continue."""

    slots: Tensor
    """int64 [num_reqs]: row of each tree's state."""
    visible: Tensor
    """bool [num_reqs, num_nodes, num_nodes]: row node descends from column node, or equals it."""
    windows: Tensor
    """int64 [num_reqs, num_nodes, width]: indices of the inputs of each node's convolution; the node's own input is
    last. Indices below `width` are the inputs before the root; the nodes' inputs follow.
    """

    @classmethod
    def of(cls, slots: Tensor, parents: Tensor, max_depth: int, width: int) -> "TreeRows":
        """Builds the rows of trees.

        Args:
            parents: int64 [num_reqs, num_nodes]: -1 for the root, otherwise less than the node's index.
            max_depth: depth of the deepest node.
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
    """Accepted paths along which states advance, and the rows in which the new states are stored.

    All reads of states precede all writes.
    """

    slots: Tensor
    """int64 [num_ends]: rows of the states to advance."""
    rows: Tensor
    """int64 [num_ends, longest]: path nodes, as indices of [num_reqs * num_nodes]."""
    num_tokens: Tensor
    """int64 [num_ends]: number of valid nodes of each path; later entries of `rows` are arbitrary."""
    targets: Tensor
    """int64 [num_ends]: rows that receive the advanced states."""
    times: int = 1
    """Number of ends of each state. The states repeat so many times; the last end of a state may replace it."""
    spare: int = -1
    """Row that several ends have as their target, because nobody needs their states; kernels do not write it."""
    _latest: dict[int, Tensor] = field(default_factory=dict)

    def latest(self, length: int) -> Tensor:
        """int64 [num_ends, length]: indices of the last valid inputs.

        Indices below `length` are the inputs before the path; the path's inputs follow.
        """
        if length not in self._latest:
            self._latest[length] = self.num_tokens[:, None] + torch.arange(length, device=self.slots.device)
        return self._latest[length]

    @cached_property
    def skipped(self) -> Tensor:
        """bool [num_ends, longest, 1]: nodes that are not valid."""
        return (torch.arange(self.rows.shape[1], device=self.rows.device) >= self.num_tokens[:, None])[..., None]

    @cached_property
    def ends(self) -> Tensor:
        """int64 [num_ends, 1]: last valid node of each path."""
        return self.rows.gather(1, (self.num_tokens - 1)[:, None])


class Added(NamedTuple):
    """Outer products, left times right, that nodes add to a recurrent state, and the decay up to each node.

    In Mamba-1 a channel is a head of one row: the parts have no dimension of heads, and `decay` has each node's own
    step sizes, [num_reqs, num_nodes, channels].
    """

    left: Tensor
    """float32 [num_reqs, num_nodes, num_left_heads, rows]."""
    right: Tensor
    """float32 [num_reqs, num_nodes, num_right_heads, columns]."""
    decay: Tensor
    """float32 [num_reqs, num_nodes, num_heads]: log of the decay from the state up to the node, itself included."""

    def copied(self, kept: "Added | None") -> "Added":
        """Copies the additions into memory that is kept, if there is such memory."""
        if kept is None:
            return self
        for room, part in zip(kept, self, strict=True):
            room.copy_(part)
        return kept


class ChannelParameters(NamedTuple):
    """Weights of Mamba-1's recurrence (arXiv 2312.00752)."""

    rate: Tensor
    """[channels, state_dim]: logarithms of minus the rates of decay."""
    bias: Tensor
    """[channels]: added to the step sizes before softplus."""
    direct: Tensor
    """[channels]: factors of the inputs that are added to the outputs."""


class Steps(NamedTuple):
    """How the step sizes of a selective state space follow from a layer's output dt [num_reqs, num_nodes, num_heads]:
    softplus(factor * dt + bias), within limits."""

    bias: Tensor
    """[num_heads]"""
    limits: tuple[float, float] = (0.0, float("inf"))
    factor: float = 1.0

    def of(self, dt: Tensor) -> Tensor:
        """Returns the step sizes, rounded where transformers rounds."""
        dt = dt if self.factor == 1.0 else dt * self.factor
        return functional.softplus(dt + self.bias.to(dt.dtype)).clamp(*self.limits)
