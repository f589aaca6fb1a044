"""GPU memory whose addresses stay while its physical memory is given back, by CUDA's virtual memory management.

Captured graphs contain addresses, so a graph that was captured before a sleep runs unchanged after the sleep. torch's
allocator has no part in this memory: tensors are created over the addresses.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from wingbeat.kernels.cuda_driver import CudaError, call_driver
from wingbeat.kernels.foreign_memory import tensor_at

ALIGNMENT_BYTES = 256
"""Alignment of tensors, the same as that of torch's allocator."""
HOST_BLOCK_BYTES = 1 << 26
"""Size of the blocks of pinned memory in which contents are saved. The size is a power of two, because torch rounds
each block up to a power of two."""
_PINNED = _ON_DEVICE = 1
_READ_AND_WRITE = 3
_SUPPORTS_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""


class Driver(Protocol):
    """Calls of CUDA's driver for virtual memory; every method may raise CudaError."""

    def granularity(self, device: torch.device) -> int:
        """Number of bytes of which every size must be a multiple."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Reserves addresses, behind which there is no memory yet; returns the first address."""
        ...

    def create(self, device: torch.device, num_bytes: int) -> int:
        """Allocates physical memory of the device; returns its handle."""
        ...

    def map(self, device: torch.device, address: int, num_bytes: int, handle: int) -> None:
        """Places physical memory behind reserved addresses, for reading and writing by the device."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Removes the physical memory behind addresses, which stay reserved."""
        ...

    def release(self, handle: int) -> None:
        """Frees physical memory once nothing is mapped to it."""
        ...


class Region:
    """Tensors of a device whose physical memory can be given back and taken again; addresses never change.

    Nothing may read or write the tensors while the region is asleep: on a GPU an access would end the process's CUDA
    context. Addresses stay reserved until their process ends.

    Args:
        driver: the driver's calls; None uses CUDA's driver.
    """

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device, self._driver = device, driver or CudaDriver()
        self._chunks: list[_Chunk] = []
        self.is_asleep = False
        self.is_empty = False
        """Whether the region has physical memory again that has no contents yet."""

    @property
    def num_bytes(self) -> int:
        """Bytes of physical memory that the region takes when it is awake."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Allocates uninitialised tensors, uint8 [size], which together are one piece of physical memory.

        Raises:
            CudaError: the device has not enough memory.
        """
        begins, total = [], 0
        for size in sizes:
            begins.append(total)
            total += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        granularity = self._driver.granularity(self._device)
        num_bytes = -(-max(total, 1) // granularity) * granularity
        chunk = _Chunk(self._device, self._driver, self._driver.reserve(num_bytes), num_bytes)
        chunk.map()
        self._chunks.append(chunk)
        return [tensor_at(chunk.address + begin, size, self._device) for begin, size in zip(begins, sizes, strict=True)]

    def save(self) -> None:
        """Copies the contents to pinned host memory, for `fill`; does nothing if the region is asleep.

        Raises:
            MemoryError: the host has not enough memory for the contents.
        """
        if self.is_asleep:
            return
        try:
            for chunk in self._chunks:
                chunk.save()
            synchronize(self._device)
        except RuntimeError as error:
            self.forget()
            raise MemoryError(str(error).partition("\n")[0]) from error

    def forget(self) -> None:
        """Frees the saved contents."""
        for chunk in self._chunks:
            chunk.saved = []

    def unmap(self) -> None:
        """Gives the physical memory back; does nothing if the region is asleep.

        The device must have finished all work on the region.
        """
        if not self.is_asleep:
            for chunk in self._chunks:
                chunk.unmap()
            self.is_asleep, self.is_empty = True, False

    def map(self) -> None:
        """Takes new physical memory; does nothing if the region is awake. `fill` must follow, or `unmap`.

        Raises:
            CudaError: the device has not enough memory; the region is still asleep then, with its saved contents.
        """
        if not self.is_asleep:
            return
        mapped: list[_Chunk] = []
        try:
            for chunk in self._chunks:
                chunk.map()
                mapped.append(chunk)
        except CudaError:
            for chunk in mapped:
                chunk.unmap()
            raise
        self.is_asleep, self.is_empty = False, True

    def fill(self) -> None:
        """Restores the saved contents after `map`; memory without saved contents is zero."""
        if not self.is_empty:
            return
        for chunk in self._chunks:
            chunk.restore()
        synchronize(self._device)
        self.forget()
        self.is_empty = False

    def close(self) -> None:
        """Gives the physical memory back for good; the region's tensors must not be used any more."""
        synchronize(self._device)
        self.unmap()
        self._chunks.clear()


class _Chunk:
    """Reserved addresses, behind which there is one piece of physical memory or none."""

    def __init__(self, device: torch.device, driver: Driver, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes
        self.saved: list[Tensor] = []
        """Contents in host memory, in blocks; empty if no contents are saved."""
        self._device, self._driver, self._handle = device, driver, 0

    def map(self) -> None:
        self._handle = self._driver.create(self._device, self.num_bytes)
        try:
            self._driver.map(self._device, self.address, self.num_bytes, self._handle)
        except CudaError:
            self._driver.release(self._handle)
            raise

    def unmap(self) -> None:
        self._driver.unmap(self.address, self.num_bytes)
        self._driver.release(self._handle)

    def save(self) -> None:
        for block in self._blocks():
            held = torch.empty(len(block), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self.saved.append(held.copy_(block, non_blocking=True))

    def restore(self) -> None:
        if not self.saved:
            tensor_at(self.address, self.num_bytes, self._device).zero_()
        for block, held in zip(self._blocks(), self.saved, strict=False):
            block.copy_(held, non_blocking=True)

    def _blocks(self) -> Iterator[Tensor]:
        yield from tensor_at(self.address, self.num_bytes, self._device).split(HOST_BLOCK_BYTES)


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_: ClassVar = [("location", _Location), ("flags", ctypes.c_int)]


class CudaDriver:
    """`Driver` of the installed NVIDIA driver."""

    def granularity(self, device: torch.device) -> int:
        """See `Driver.granularity`; raises CudaError if the device has no virtual memory management."""
        supported = ctypes.c_int()
        call_driver("cuDeviceGetAttribute", ctypes.byref(supported), _SUPPORTS_VIRTUAL_MEMORY, _index(device))
        if not supported.value:
            raise CudaError(f"{device} has no virtual memory management")
        size, properties = ctypes.c_size_t(), _properties(device)
        call_driver("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), 0)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """See `Driver.reserve`."""
        address = ctypes.c_uint64()
        size, anywhere, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint64(), ctypes.c_uint64()
        call_driver("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(), anywhere, flags)
        return address.value

    def create(self, device: torch.device, num_bytes: int) -> int:
        """See `Driver.create`."""
        handle, properties = ctypes.c_uint64(), _properties(device)
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint64()
        call_driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), flags)
        return handle.value

    def map(self, device: torch.device, address: int, num_bytes: int, handle: int) -> None:
        """See `Driver.map`."""
        place, size = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)
        call_driver("cuMemMap", place, size, ctypes.c_size_t(), ctypes.c_uint64(handle), ctypes.c_uint64())
        access = _Access(_Location(_ON_DEVICE, _index(device)), _READ_AND_WRITE)
        try:
            call_driver("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
        except CudaError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """See `Driver.unmap`."""
        call_driver("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        call_driver("cuMemRelease", ctypes.c_uint64(handle))


def _index(device: torch.device) -> int:
    return device.index or 0


def _properties(device: torch.device) -> _Properties:
    return _Properties(_PINNED, 0, _Location(_ON_DEVICE, _index(device)))
