"""Large zeroed tensors of the host, of pages that take memory as they are used and are promised to it meanwhile."""

import mmap
from math import prod

import torch
from torch import Tensor

from wingbeat.runtime.memory_promises import PROMISES


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU; other processes of the machine count all of them as taken (`MemoryPromises`)."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    PROMISES.map(memory, whole.data_ptr())
    return whole[:num_bytes].view(dtype).view(shape)
