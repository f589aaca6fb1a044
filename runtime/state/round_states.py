"""Assignment of a round's rows to the states of sequences, built once per round for all mixers."""

from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.state.rows import Path, TreeRows
from wingbeat.runtime.round.rows import Decodes
from wingbeat.runtime.state.pool import StatePool


class KeptRows:
    """Mixer inputs of a round's decodes, kept until the accepted paths are known.

    The inputs of rounds with at most `capacity` rows have fixed addresses, because a captured graph of the token choice
    reads from these addresses.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._latest: dict[Hashable, list[Tensor]] = {}
        self._rooms: dict[Hashable, list[Tensor]] = {}

    def taken(self, mixer: Hashable, like: list[Tensor], num_nodes: int) -> list[Tensor]:
        """Returns memory for a mixer's inputs, tensors [num_reqs, num_nodes, ...], contiguous.

        Args:
            like: tensors [num_reqs * num_nodes, ...] of these shapes and dtypes.
        """
        num_rows = len(like[0])
        if num_rows > self.capacity:
            self._latest[mixer] = [part.new_empty(part.shape).unflatten(0, (-1, num_nodes)) for part in like]
            return self._latest[mixer]
        if mixer not in self._rooms:
            self._rooms[mixer] = [part.new_zeros(self.capacity, *part.shape[1:]) for part in like]
        return [room[:num_rows].unflatten(0, (-1, num_nodes)) for room in self._rooms[mixer]]

    def put(self, mixer: Hashable, parts: list[Tensor]) -> None:
        """Stores a mixer's inputs, tensors of [num_reqs, num_nodes, ...]."""
        rooms = self.taken(mixer, [part.flatten(0, 1) for part in parts], parts[0].shape[1])
        for room, part in zip(rooms, parts, strict=True):
            room.copy_(part)

    def latest_states(self, mixer: Hashable, num_reqs: int, num_nodes: int) -> list[Tensor]:
        """Returns the tensors [num_reqs, num_nodes, ...] that the latest pass over these decodes stored."""
        num_rows = num_reqs * num_nodes
        if num_rows > self.capacity:
            return self._latest[mixer]
        return [room[:num_rows].unflatten(0, (num_reqs, num_nodes)) for room in self._rooms[mixer]]


class DecodeStates:
    """A round's decodes as mixers process them: trees of equal width, each starting from its sequence's state.

    All shapes depend only on the arguments' shapes.

    Args:
        longest: maximum number of nodes of a path.
        window: maximum number of past inputs that a convolution reads.
        chains: whether each tree is a single path, with nodes in path order.
    """

    def __init__(self, decodes: Decodes, longest: int, window: int, chains: bool) -> None:
        self.decodes = decodes
        self._longest, self._window = min(longest, decodes.token_ids.shape[1]), window
        self._is_path = chains or decodes.tree is None

    @property
    def slots(self) -> Tensor:
        """int64 [num_seqs]: for each sequence of `paths_of`, the slot that holds the sequence's starting state."""
        slots = self.decodes.slots
        return slots if self._is_path else slots.repeat_interleave(self._paths.shape[1])

    @cached_property
    def trees(self) -> TreeRows:
        """The trees in the form that tree recurrences read."""
        slots, tree = self.decodes.slots, self.decodes.tree
        parents = torch.full_like(slots[:, None], -1) if tree is None else tree.parents
        return TreeRows.of(slots, parents, self._longest - 1, self._window)

    @cached_property
    def _paths(self) -> Tensor:
        """int64 [num_reqs, num_nodes, longest]: path from the root to each node, padded by repeating the node."""
        tree = self.decodes.tree
        up = tree.parents.clamp(min=0)
        above = [torch.arange(up.shape[1], device=up.device).expand_as(up)]
        for _ in range(self._longest - 1):
            above.append(up.gather(1, above[-1]))
        steps = tree.depths[..., None] - torch.arange(self._longest, device=up.device)
        return torch.stack(above, dim=2).gather(2, steps.clamp(0, self._longest - 1))

    def padded(self, rows: Tensor) -> Tensor:
        """Pads a batch's first rows, which are the decodes: [num_rows or more, n] -> [num_reqs, num_nodes, n]."""
        return self.decodes.padded(rows)

    def paths_of(self, padded: Tensor) -> Tensor:
        """Gathers rows along paths: [num_reqs, num_nodes, ...] -> [num_seqs, longest, ...]."""
        if self._is_path:
            return padded
        num_reqs, num_nodes, longest = self._paths.shape
        return _along(padded, self._paths.flatten(1)).view(num_reqs * num_nodes, longest, *padded.shape[2:])

    def nodes_of(self, mixed: Tensor) -> Tensor:
        """Inverse of `paths_of`: [num_seqs, longest, ...] -> [num_reqs, num_nodes, ...]."""
        if self._is_path:
            return mixed
        depths = self.decodes.tree.depths
        return _along(mixed, depths.clamp(max=self._longest - 1).view(-1, 1)).view(*depths.shape, *mixed.shape[2:])


class AcceptedStates(NamedTuple):
    """Nodes along which the states of a round's decodes advance."""

    slots: Tensor
    """int64 [num_reqs]: slots of the decodes."""
    num_nodes: int
    """Number of nodes of each tree, padding included."""
    nodes: Tensor
    """int64 [num_reqs, longest]: root and accepted nodes; shorter paths repeat the last node."""
    num_tokens: Tensor
    """int64 [num_reqs]: number of accepted tokens among the nodes."""
    saves: tuple[tuple[Tensor, Tensor], ...]
    """States to save on the way along the path, as pairs: the number of accepted nodes before the state is copied,
    int64 [num_reqs], and the pool row of the copy, int64 [num_reqs] (the spare row if the path ends earlier).
    """
    spare: int
    """The spare row, which padding rows have as well."""

    def path(self) -> Path:
        """Returns the paths of the copies to save, followed by the paths of the states themselves."""
        num_reqs, times = len(self.slots), 1 + len(self.saves)
        first = torch.arange(num_reqs, device=self.slots.device)[:, None] * self.num_nodes
        num_tokens, targets = zip(*self.saves, (self.num_tokens, self.slots), strict=True)
        rows = (first + self.nodes).repeat(times, 1)
        return Path(self.slots.repeat(times), rows, torch.cat(num_tokens), torch.cat(targets), times, self.spare)

    def rows_of(self, padded: Tensor) -> Tensor:
        """Gathers rows along the accepted paths: [num_reqs, num_nodes, ...] -> [num_reqs, longest, ...]."""
        return _along(padded, self.nodes)


def _along(padded: Tensor, nodes: Tensor) -> Tensor:
    """Gathers [num_reqs, num_nodes, ...] by int64 [num_reqs, m] -> [num_reqs, m, ...]."""
    rows = nodes.view(*nodes.shape, *[1] * (padded.dim() - 2))
    return padded.gather(1, rows.expand(-1, -1, *padded.shape[2:]))


class Piece(NamedTuple):
    """Rows of one prompt chunk up to a length at which a state is saved; the rows advance the state."""

    start: int
    length: int
    live: Tensor
    """int64 [1]: pool row of the state."""
    save: Tensor | None = None
    """int64 [1]: pool row for a copy of the state; None if no copy is saved."""


class RoundStates(NamedTuple):
    """A round's rows, grouped by the state that they advance, for its mixers."""

    pool: StatePool
    kept: KeptRows
    decodes: DecodeStates | None
    pieces: list[Piece]
    """Pieces of prompt chunks in the order of their rows, which come after the decodes' rows."""
