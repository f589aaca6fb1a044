"""Large zeroed tensors of the host, of pages that take memory as they are used and are promised to it meanwhile."""

import ctypes
import mmap
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from wingbeat.runtime.memory_promises import PROMISES


def give_back(tensors: Iterable[Tensor]) -> int:
    """Give the system the pages back that lie within tensors of the host, and read as zeros from then on; returns
    their bytes. The tensors stay where they are."""
    madvise, total = ctypes.CDLL(None, use_errno=True).madvise, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "memory is not given back")
            total += size
    return total


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU; other processes of the machine count all of them as taken (`MemoryPromises`)."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    PROMISES.map(memory, whole.data_ptr())
    return whole[:num_bytes].view(dtype).view(shape)
