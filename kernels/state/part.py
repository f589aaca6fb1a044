"""The kernel of the gated delta rule; imports what it adds where it is asked for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wingbeat.kernels.comparison_inputs import Shape


def kernels() -> dict[str, str]:
    """Its module."""
    return {"delta_rule": "wingbeat.kernels.state.triton"}


def cases() -> "dict[str, Callable[[torch.device, Shape], list[Tensor]]]":
    """The kernel over two trees."""
    from wingbeat.kernels.state.comparison_case import over_trees

    return {"delta_rule": over_trees}
