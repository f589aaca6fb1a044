"""A model whose layers are divided among processes: what each computes of a layer's outputs is an addend."""

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
