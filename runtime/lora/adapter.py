"""What an adapter does to linear layers, whatever it was read from; loads no torch."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class AdapterError(ValueError):
    """An adapter cannot be served; one line that names its folder and what is wrong."""


class LinearShape(NamedTuple):
    """Of a linear layer that adapters may act on."""

    inputs: int
    outputs: int


class LinearAdapter(NamedTuple):
    """What an adapter does to one linear layer: x -> x a^T b^T."""

    a: "Tensor"
    """float32 [rank, inputs]"""
    b: "Tensor"
    """float32 [outputs, rank], scaled."""
