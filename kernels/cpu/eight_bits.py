"""8-bit weights: an integer from -127 to 127 per element, and a float32 scale per output channel."""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
_ODD_BITS = 8
"""Trailing zero bits of a scale's 24-bit significand, so that its product with an 8-bit integer is exact in float32.
Quantizing a dequantized weight therefore returns the same weight."""


class EightBits(NamedTuple):
    """Quantized weight [columns, inputs] = values * scales[:, None]."""

    values: Tensor
    """int8 [columns, inputs]"""
    scales: Tensor
    """float32 [columns]"""

    def dense(self) -> Tensor:
        """Dequantizes the weight to float32."""
        return self.values * self.scales[:, None]


def to_eight_bits(weight: Tensor) -> EightBits:
    """Quantizes a finite weight [columns, inputs]; each channel's largest magnitude maps to `LARGEST`."""
    wide = weight.detach().float()
    bits = (wide.abs().amax(dim=1) / LARGEST).view(torch.int32)
    half = 1 << (_ODD_BITS - 1)
    scales = (bits + half & -2 * half).view(torch.float32)
    # Channels of zeros, or of numbers too small for a scale, get scale 0.
    values = wide.div(scales.masked_fill(scales == 0, torch.inf)[:, None])
    return EightBits(values.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales)
