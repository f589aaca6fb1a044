"""Large zeroed tensors of the host: there at once, while the kernel fills their pages beside the caller."""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, of pages that take memory from when they are used; see `populate`."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


def populate(tensors: Sequence[Tensor]) -> threading.Thread:
    """Take the memory of mapped tensors, on a thread of its own: what another process finds free is so then.

    A kernel before Linux 5.14 refuses, and takes it page by page as it is used.
    """
    thread = threading.Thread(target=_populate, args=(tensors,), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(tensors: Sequence[Tensor]) -> None:
    libc = ctypes.CDLL(None)  # its calls let go of the interpreter
    for tensor in tensors:
        libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), _MADV_POPULATE_WRITE)
