"""Interfaces for a model whose layers are divided among processes.

Each process computes an addend of a layer's output.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Division(Protocol):
    """The group of processes, from the view of one process."""

    @property
    def first(self) -> bool:
        """Whether this process adds what all processes hold in full, such as the residual stream."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Sums the addends of all processes, in place."""
        ...

    def agree(self, problem: str | None) -> str | None:
        """Returns one process's problem with a step that all tried, in one line; None if it worked on all.

        Args:
            problem: this process's own problem, or None.
        """
        ...


class WeightShards(Protocol):
    """Mapping of a process's shards to whole weights."""

    tell: Callable[[str, Tensor | None], None] | None
    """On the leading process: makes the other processes write their shards of the named weight; None ends the
    update."""
    problem: str | None
    """Reason why weights cannot be written; None if they can."""

    def shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a whole weight of which this process has a shard of shape `own`."""
        ...

    def part(self, name: str, value: Tensor) -> Tensor:
        """Returns this process's shard of a whole weight."""
        ...
