"""Weights of few bits in groups of inputs, as files have them (GGUF's Q8_0, Q4_0, Q4_1)."""

from typing import NamedTuple

from torch import Tensor

GROUP = 32
"""Inputs of a column that share a scale."""


class GroupedWeight(NamedTuple):
    """A weight [columns, inputs] = values * scale + minimum, with a scale and a minimum of each group of inputs."""

    values: Tensor
    """int8 [columns, inputs]; of four bits uint8, 0 to 15"""
    scales: Tensor
    """float16 [columns, inputs / GROUP]"""
    minima: Tensor | None = None
    """float16 likewise; without it a minimum is `offset` times the scale."""
    offset: float = 0.0

    def dense(self) -> Tensor:
        """The weight itself, in float32."""
        values, scales = self.values.unflatten(1, (-1, GROUP)).float(), self.scales.float()[:, :, None]
        if self.minima is None:
            return ((values + self.offset) * scales).flatten(1)
        return (values * scales + self.minima.float()[:, :, None]).flatten(1)
