"""Which rows of a round belong to which sequence's state, and which states go on: made once a round, for all mixers."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from wingbeat.runtime.state.pool import Saves, StatePool


class DecodePaths(NamedTuple):
    """The rows of a round's decodes as paths, each from its sequence's state."""

    live: Tensor
    """int64 [num_paths]: row of the pool."""
    length: int
    """Of the longest path; shorter ones end in rows that do not count."""
    num_rows: int
    stores: bool
    """Whether the states go on by these rows: bare roots, which are accepted for certain."""
    rows: Tensor | None = None
    """int64 [num_paths, length]: row of each token; None where they follow one another."""
    back: Tensor | None = None
    """int64 [num_rows]: index of each row among the paths' tokens; None where they follow one another."""
    saves: Saves | None = None
    """Where `stores`."""

    def paths_of(self, rows: Tensor) -> Tensor:
        """[num_rows or more, n] -> [num_paths, length, n]"""
        if self.rows is None:
            return rows[: self.num_rows].unflatten(0, (-1, self.length))
        return rows[self.rows]

    def flatten(self, mixed: Tensor) -> Tensor:
        """The way back from `paths_of`."""
        mixed = mixed.flatten(0, 1)
        return mixed if self.back is None else mixed.index_select(0, self.back)


class Piece(NamedTuple):
    """Rows of one prompt chunk up to where a state is saved; states go on by them."""

    start: int
    length: int
    live: Tensor
    """int64 [1]: row of the pool."""
    saves: Saves | None = None


class AcceptedStep(NamedTuple):
    """Accepted paths of equal length, or their parts up to where a state is saved."""

    rows: Tensor
    """int64 [num_seqs, length], of the round."""
    live: Tensor
    """int64 [num_seqs]"""
    saves: Saves | None = None


@dataclass
class RoundStates:
    """What a round's mixers are told."""

    pool: StatePool
    decodes: DecodePaths | None
    pieces: list[Piece]
    """Of the prompt chunks, in the order of their rows, behind the decodes'."""
    accepted: list[AcceptedStep] = field(default_factory=list)
    """Once the round is decided: how states go on that it did not let go on."""
    _kept: dict[Hashable, list[Tensor]] = field(default_factory=dict)

    def keep(self, mixer: Hashable, rows: list[Tensor]) -> None:
        """Remember what a mixer was given for the rows of decodes."""
        self._kept[mixer] = rows

    def kept(self, mixer: Hashable) -> list[Tensor]:
        """What it was given."""
        return self._kept[mixer]
