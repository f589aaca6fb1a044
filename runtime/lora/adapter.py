"""Adapters of linear layers, independent of their file format; imports no torch."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"


class AdapterError(ValueError):
    """An adapter cannot be served; the message is one line with the adapter's folder and the reason."""


class LinearShape(NamedTuple):
    """Sizes of a linear layer that adapters may act on."""

    inputs: int
    outputs: int


class LinearAdapter(NamedTuple):
    """Matrices of an adapter for one linear layer; x a^T b^T is added to the layer's output for input x."""

    a: "Tensor"
    """float32 [rank, inputs]"""
    b: "Tensor"
    """float32 [outputs, rank]; already multiplied by the adapter's scale."""
