"""Inputs that kernels are compared on: see `wingbeat.kernels.gpu.comparison`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """Shape that the kernels' variants follow from: a model's, or a usual one."""

    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    fp8_cache: bool = False


def random_numbers(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)
