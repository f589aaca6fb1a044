"""Large zeroed host tensors. A page takes physical memory only after the page has been written.

The whole tensor is reserved from the start, so that other processes count all its bytes as taken.
"""

import mmap
from math import prod

import torch
from torch import Tensor

from wingbeat.runtime.promises.memory_promises import PROMISES


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a zero tensor on the CPU, all bytes of which other processes count as taken (`MemoryPromises`)."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    PROMISES.map(memory, whole.data_ptr())
    return whole[:num_bytes].view(dtype).view(shape)
