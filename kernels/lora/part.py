"""The kernel of adapters; imports what it adds where it is asked for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wingbeat.kernels.comparison_inputs import Shape


def kernels() -> dict[str, str]:
    """Its module."""
    return {"add_adapters": "wingbeat.kernels.lora.adapters_triton"}


def cases() -> "dict[str, Callable[[torch.device, Shape], list[Tensor]]]":
    """The kernel over rows of two adapters."""
    from wingbeat.kernels.lora.comparison_case import of_two_adapters

    return {"add_adapters": of_two_adapters}
