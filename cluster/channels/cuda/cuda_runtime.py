"""CUDA functions that a CUDA IPC channel needs, through torch and the CUDA runtime. Contains nothing about channels.

Memory is allocated by `cudaMalloc`, which is called through ctypes in the CUDA runtime that torch has loaded. torch's
own sharing, `torch.UntypedStorage._share_cuda_`, does not fit: it is a private interface, exports a whole segment of
the allocator, and counts one reference for each export and receiver. Every new drafter would therefore need a new
export, and every killed drafter would leak the memory. The runtime functions used here have kept their signatures since
CUDA 5.0.

Events come from `torch.cuda.Event`, whose IPC interface is public and unchanged from torch 2.11 to 2.13. Tensors over
the memory of a peer GPU count as memory of the GPU that mapped it (`kernels.foreign_memory`); kernels of the mapping
GPU read that memory over NVLink or PCIe.
"""

import ctypes
import functools
import time
from typing import Any, ClassVar

import torch
from torch import Tensor

from wingbeat.kernels.cuda_driver import CudaError, call_driver
from wingbeat.kernels.foreign_memory import tensor_at

HANDLE_BYTES = 64
"""Size of cudaIpcMemHandle_t and of cudaIpcEventHandle_t."""
GRANULARITY_BYTES = 2 * 2**20
"""cudaMalloc places smaller allocations in shared blocks of 2 MiB, and a handle exports the whole block."""
DRAIN_POLL_S = 1e-3
_LAZY_PEER_ACCESS = 1
_MAPPED = 2
"""cudaHostRegisterMapped"""
_IPC_EVENT_SUPPORT = 125
"""cudaDevAttrIpcEventSupport"""


class CudaRuntime:
    """CUDA functions from torch and from the CUDA runtime library that torch has loaded.

    Tests without a GPU use a fake in place of this class.

    Every method may raise CudaError.
    """

    def count(self) -> int:
        """Number of CUDA devices that this process sees."""
        return torch.cuda.device_count()

    def describe(self, device: torch.device) -> str:
        """Description of the device for messages: index, name and UUID."""
        return f"cuda:{device.index} ({torch.cuda.get_device_name(device)}, {self.uuid(device)})"

    def uuid(self, device: torch.device) -> str:
        """UUID of the GPU, which is the same in all processes, whatever their CUDA_VISIBLE_DEVICES."""
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def find(self, uuid: str) -> torch.device | None:
        """The GPU with that UUID, or None if this process does not see it."""
        devices = (torch.device("cuda", index) for index in range(self.count()))
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def can_access_peer(self, device: torch.device, peer: torch.device) -> bool:
        """Whether kernels on `device` can use memory of `peer`."""
        return torch.cuda.can_device_access_peer(device, peer)

    def shares_events(self, device: torch.device) -> bool:
        """Whether other processes can open the device's events. Such processes can also open the device's memory."""
        value = ctypes.c_int()
        attribute, index = ctypes.c_int(_IPC_EVENT_SUPPORT), ctypes.c_int(device.index)
        _call(device, "cudaDeviceGetAttribute", ctypes.byref(value), attribute, index)
        return bool(value.value)

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Address of newly allocated, zeroed memory that can be exported."""
        address = ctypes.c_void_p()
        size = -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        _call(device, "cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        self.tensor(device, _number(address), size).zero_()
        # Wait, because the zeros must be written before another stream or process uses the memory.
        self.current_stream(device).synchronize()
        return _number(address)

    def free(self, device: torch.device, address: int) -> None:
        """Free memory from `allocate`; waits for the device's work."""
        _call(device, "cudaFree", ctypes.c_void_p(address))

    def allocation_of(self, device: torch.device, address: int) -> tuple[int, int]:
        """Start and bytes of the allocation that contains an address; the allocation may be any library's."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with torch.cuda.device(device):
            call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def export_memory(self, device: torch.device, address: int) -> bytes:
        """IPC handle, HANDLE_BYTES long, of the allocation that begins at `address`."""
        handle = _Handle()
        _call(device, "cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open_memory(self, device: torch.device, handle: bytes) -> int:
        """Map another process's memory for use by `device`, and return its address in this process.

        The memory may be on another GPU than `device`.
        """
        address = ctypes.c_void_p()
        opened = _Handle.from_buffer_copy(handle)
        _call(device, "cudaIpcOpenMemHandle", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _number(address)

    def close_memory(self, device: torch.device, address: int) -> None:
        """Unmap memory from `open_memory`."""
        _call(device, "cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def map_host(self, device: torch.device, address: int, num_bytes: int) -> int:
        """Pin pages of this process's memory, and return the address at which the device accesses them."""
        _call(device, "cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_MAPPED))
        mapped = ctypes.c_void_p()
        try:
            _call(device, "cudaHostGetDevicePointer", ctypes.byref(mapped), ctypes.c_void_p(address), ctypes.c_uint(0))
        except CudaError:
            self.unmap_host(device, address)
            raise
        return _number(mapped)

    def unmap_host(self, device: torch.device, address: int) -> None:
        """Undo `map_host`."""
        _call(device, "cudaHostUnregister", ctypes.c_void_p(address))

    def write_value(self, device: torch.device, address: int, value: int) -> None:
        """Make the calling thread's current stream write an int64, after all its earlier work is visible everywhere."""
        self._on_stream("cuStreamWriteValue64_v2", device, address, value)

    def wait_value(self, device: torch.device, address: int, value: int) -> None:
        """Make the calling thread's current stream wait until the int64 at a device's address is at least `value`."""
        self._on_stream("cuStreamWaitValue64_v2", device, address, value)

    def _on_stream(self, name: str, device: torch.device, address: int, value: int) -> None:
        stream = ctypes.c_void_p(self.current_stream(device).cuda_stream)
        with torch.cuda.device(device):
            call_driver(name, stream, ctypes.c_uint64(address), ctypes.c_uint64(value), ctypes.c_uint(0))

    def mark(self, device: torch.device) -> Any:
        """A new event, recorded on the calling thread's current stream."""
        return self.current_stream(device).record_event()

    def tensor(self, device: torch.device, address: int, num_bytes: int) -> Tensor:
        """Tensor uint8 [num_bytes] over memory that lies on the device or is mapped for it.

        The tensor does not keep the memory alive.
        """
        return tensor_at(address, num_bytes, device)

    def create_event(self, device: torch.device) -> torch.cuda.Event:
        """A new interprocess event of the device."""
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            event.ipc_handle()  # torch creates the event at its first export, on the device that is current then
        return event

    def open_event(self, device: torch.device, handle: bytes) -> Any:
        """Open another process's event.

        Streams of `device` can wait for the event; this process can query but not record it.
        """
        return torch.cuda.Event.from_ipc_handle(device, handle)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The calling thread's current stream of the device."""
        return torch.cuda.current_stream(device)

    def drain(self, device: torch.device, stream: Any, timeout_s: float) -> bool:
        """Wait until the stream has done the work enqueued so far; return False after `timeout_s`."""
        done = torch.cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(DRAIN_POLL_S)
        return True


def _number(address: ctypes.c_void_p) -> int:
    """The address as int; ctypes represents 0 as None."""
    return address.value or 0


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t; passed by value."""

    _fields_: ClassVar = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def _call(device: torch.device, name: str, *arguments: object) -> None:
    """Call the CUDA runtime with `device` current. Raises CudaError."""
    cudart = _cudart()
    with torch.cuda.device(device):
        status = getattr(cudart, name)(*arguments)
    if status:
        cudart.cudaGetLastError()  # clears the error, which torch would otherwise report for its next launch
        reason = cudart.cudaGetErrorString(status).decode()
        raise CudaError(f"{name} on cuda:{device.index} failed: {reason} (cudaError {status})")


@functools.cache
def _cudart() -> ctypes.CDLL:
    """The CUDA runtime that is loaded in this process; dlopen finds a loaded library by its soname.

    Raises:
        CudaError: torch was built without CUDA, or links the runtime statically.
    """
    if torch.version.cuda is None:
        raise CudaError("this build of torch has no CUDA (torch.version.cuda is None)")
    torch.cuda.init()
    name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise CudaError(f"the CUDA runtime {name} of torch {torch.__version__} cannot be opened: {error}") from None
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library
