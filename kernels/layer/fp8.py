"""Products by weights of eight bits: float8 values with a float32 scale for each output channel.

The torch reference; on GPUs `kernels.gpu.fp8` reads the weights as they are stored, which is half of bfloat16's bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels import choice

LARGEST = 448.0
"""Of float8_e4m3fn."""


class Fp8Weight(NamedTuple):
    """A weight [out_features, in_features] = values * scales[:, None]."""

    values: Tensor
    """float8_e4m3fn [out_features, in_features], contiguous"""
    scales: Tensor
    """float32 [out_features]"""


def to_fp8(weight: Tensor) -> Fp8Weight:
    """Round a weight [out_features, in_features], each channel's largest value to the largest there is."""
    wide = weight.detach().to(torch.float32)
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    values = (wide / scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Weight(values.contiguous(), scales)


def fp8_linear(inputs: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """inputs @ weight.T + bias, summed in float32.

    Args:
        inputs: [..., in_features], any float type.
        bias: [out_features].

    Returns:
        [..., out_features] in the inputs' dtype.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    values, scales = weight
    if values.dtype != torch.float8_e4m3fn or inputs.shape[-1:] != values.shape[1:] or len(scales) != len(values):
        raise ValueError(f"weight is {values.dtype} {list(values.shape)} and inputs are {list(inputs.shape)}")
    if kernels := choice.compiled("fp8_linear", inputs):
        return kernels.fp8_linear(inputs, values, scales, bias)
    out = (inputs.to(torch.float32) @ values.to(torch.float32).t()) * scales
    return (out if bias is None else out + bias.to(torch.float32)).to(inputs.dtype)
