"""Weights of eight bits: a whole number of -127 to 127 for each, and a float32 scale for each output channel."""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
_ODD_BITS = 8
"""Of a scale's 24, those that are 0: its product with any of the whole numbers is a float32 number, exactly. So a
weight that was rounded is rounded to itself."""


class EightBits(NamedTuple):
    """A weight [columns, inputs] = values * scales[:, None]."""

    values: Tensor
    """int8 [columns, inputs]"""
    scales: Tensor
    """float32 [columns]"""

    def dense(self) -> Tensor:
        """The weight itself, in float32."""
        return self.values * self.scales[:, None]


def to_eight_bits(weight: Tensor) -> EightBits:
    """Round a finite weight [columns, inputs], each channel's largest number to the largest there is."""
    wide = weight.detach().float()
    bits = (wide.abs().amax(dim=1) / LARGEST).view(torch.int32)
    half = 1 << (_ODD_BITS - 1)
    scales = (bits + half & -2 * half).view(torch.float32)
    # A channel of zeros, or of numbers too small for a scale, has a scale of 0.
    values = wide.div(scales.masked_fill(scales == 0, torch.inf)[:, None])
    return EightBits(values.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales)
