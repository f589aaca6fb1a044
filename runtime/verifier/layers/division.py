"""Interfaces for a model whose layers are divided among processes.

Each process computes an addend of each layer's output, and the processes sum their addends.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Division(Protocol):
    """Interface through which one process uses its group of processes, which share a model."""

    @property
    def first(self) -> bool:
        """Whether this process adds terms that all processes hold in full, such as the residual stream, to its addend.

        The other processes leave such terms out.
        """
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Sums the addends of all processes, in place."""
        ...

    def agree(self, problem: str | None) -> str | None:
        """Returns, in one line, the problem that any process of the group had with a step.

        Returns None if the step worked on all processes.

        Args:
            problem: this process's own problem, or None.
        """
        ...


class WeightShards(Protocol):
    """Relation between a process's shards and the whole weights."""

    tell: Callable[[str, str, Tensor | None], None] | None
    """Function of the leading process that makes the other processes take a step with their shards of the named weight:
    write the given whole weight, `finish` an update, `read`, `save` or `restore` the shard. None on the other
    processes."""
    change_memory: Callable[[tuple[str, str, int | str], Callable[[], object]], str | None] | None
    """Function of the leading process that makes all processes take a step together: the other processes call the hook
    `change_memory` with the tuple, and the leading process calls the given function. Returns the problem of the first
    process that could not take the step. None on the other processes."""
    problem: str | None
    """Reason why weights cannot be written; None if weights can be written."""

    def shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a whole weight of which this process has a shard of shape `own`."""
        ...

    def shard_of(self, name: str, value: Tensor) -> Tensor:
        """Returns this process's shard of a whole weight."""
        ...

    def whole_of(self, name: str, own: Tensor) -> Tensor:
        """Returns a whole weight of which this process has the shard `own`; all processes call this together."""
        ...
