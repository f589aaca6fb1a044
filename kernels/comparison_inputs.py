"""Random inputs on which kernels are compared with their references: see `wingbeat.kernels.gpu.comparison`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """Model dimensions that determine which kernel variants are compiled; the defaults are typical ones."""

    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    fp8_cache: bool = False


def random_numbers(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns standard normal numbers that depend only on `seed`, shape and dtype."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)
