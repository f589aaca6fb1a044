"""Large zeroed host tensors. A page takes physical memory only after the page has been written.

The whole tensor is reserved from the start, so that other processes count all its bytes as taken.
"""

import ctypes
import mmap
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from wingbeat.runtime.memory_promises import PROMISES


def give_back(tensors: Iterable[Tensor]) -> int:
    """Gives the memory of host tensors' pages back to the system; returns the number of bytes.

    The tensors keep their addresses and read as zeros afterwards.
    """
    madvise, total = ctypes.CDLL(None, use_errno=True).madvise, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed: memory is not returned to the system")
            total += size
    return total


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a zero tensor on the CPU, all bytes of which other processes count as taken (`MemoryPromises`)."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    PROMISES.map(memory, whole.data_ptr())
    return whole[:num_bytes].view(dtype).view(shape)
