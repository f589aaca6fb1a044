"""Adapters of linear layers, whatever they were read from; loads no torch."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"


class AdapterError(ValueError):
    """An adapter cannot be served; one line that names its folder and what is wrong."""


class LinearShape(NamedTuple):
    """Sizes of a linear layer that adapters may act on."""

    inputs: int
    outputs: int


class LinearAdapter(NamedTuple):
    """Effect of an adapter on one linear layer: x a^T b^T is added to what the layer makes of x."""

    a: "Tensor"
    """float32 [rank, inputs]"""
    b: "Tensor"
    """float32 [outputs, rank], scaled."""
