"""8-bit weights: an integer from -127 to 127 per element, and a scale per output channel or per group of inputs."""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import INT8, GroupedWeight, Scales

LARGEST = 127
_ODD_BITS = 8
"""Trailing zero bits of a scale's 24-bit significand, so that its product with an 8-bit integer is exact in float32.
Quantizing a dequantized weight therefore returns the same weight."""
GROUP = 32
"""Inputs that share a scale in `in_groups`."""


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


def in_groups(weight: Tensor) -> GroupedWeight:
    """Quantizes a finite weight [columns, inputs], with a float16 scale for each `GROUP` inputs of a column."""
    wide = weight.detach().float().unflatten(1, (-1, GROUP))
    scales = (wide.abs().amax(dim=2) / LARGEST).half()
    # Groups of zeros, or of numbers too small for a scale, get scale 0.
    values = wide.div(scales.float().masked_fill(scales == 0, torch.inf)[:, :, None])
    values = values.round_().clamp_(-LARGEST, LARGEST).to(torch.int8).flatten(1)
    return GroupedWeight(INT8, values.view(torch.uint8), Scales(scales))
