"""A model whose layers are divided among processes: what each computes of a layer's outputs is an addend."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Division(Protocol):
    """The processes, as one of them sees them."""

    @property
    def first(self) -> bool:
        """Whether what all of them have, such as the residual stream, is this one's to add."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Sum of the parts that all processes have, in place."""
        ...

    def agree(self, problem: str | None) -> str | None:
        """Problem, in one line, that a process has with what all have tried; None where it has worked.

        Args:
            problem: this one's own.
        """
        ...


class WeightShards(Protocol):
    """Which part of which weight a process has."""

    tell: Callable[[str, Tensor | None], None] | None
    """On the process that leads: has the others write their parts of a weight by its name, and finish by None."""
    problem: str | None
    """Why weights are not written; None where they are."""

    def shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a whole weight, of which this process has a part of the shape `own`."""
        ...

    def part(self, name: str, value: Tensor) -> Tensor:
        """This process's part of a whole weight."""
        ...
