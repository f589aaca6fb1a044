"""CUDA's virtual memory over the host's: physical memory is files, and an address without any cannot be read."""

import ctypes
import mmap
import os

import torch

from wingbeat.kernels.cuda_driver import CudaError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


class HostDriver:
    """`Driver` of one card.

    Args:
        total_bytes: physical memory of the card.
    """

    GRANULARITY = 1 << 16

    def __init__(self, total_bytes: int = 1 << 40) -> None:
        self.total_bytes = total_bytes
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}
        """Sizes, by address."""
        self.mapped: dict[int, int] = {}
        """Handles, by address."""
        self.created: dict[int, int] = {}
        """Sizes, by handle."""

    @property
    def physical_bytes(self) -> int:
        """Physical memory that is taken."""
        return sum(self.created.values())

    def is_missing(self, address: int) -> bool:
        """Whether an address is reserved and has no memory behind it."""
        begin = next((one for one, size in self.reserved.items() if one <= address < one + size), None)
        return begin is not None and begin not in self.mapped

    def granularity(self, device: torch.device) -> int:
        return self.GRANULARITY

    def reserve(self, num_bytes: int) -> int:
        self.calls.append("reserve")
        assert num_bytes % self.GRANULARITY == 0
        address = _mapping(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.reserved[address] = num_bytes
        return address

    def create(self, device: torch.device, num_bytes: int) -> int:
        self.calls.append("create")
        if self.physical_bytes + num_bytes > self.total_bytes:
            raise CudaError("cuMemCreate failed: out of memory (CUresult 2)")
        handle = os.memfd_create("wingbeat-physical")
        os.truncate(handle, num_bytes)
        self.created[handle] = num_bytes
        # what a card's memory holds before it is written
        os.pwrite(handle, b"\xff" * min(num_bytes, 1 << 20), 0)
        return handle

    def map(self, device: torch.device, address: int, num_bytes: int, handle: int) -> None:
        self.calls.append("map")
        assert self.reserved[address] == self.created[handle] == num_bytes
        assert address not in self.mapped
        access = mmap.PROT_READ | mmap.PROT_WRITE
        _mapping(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, handle)
        self.mapped[address] = handle

    def unmap(self, address: int, num_bytes: int) -> None:
        self.calls.append("unmap")
        assert self.reserved[address] == num_bytes
        del self.mapped[address]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _mapping(address, num_bytes, _PROT_NONE, flags, -1)

    def release(self, handle: int) -> None:
        self.calls.append("release")
        assert handle not in self.mapped.values()
        del self.created[handle]
        os.close(handle)


def _mapping(address: int | None, num_bytes: int, access: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, access, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    return found
