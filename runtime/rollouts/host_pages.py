"""Memory of host tensors that is given back to the system."""

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor


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
