"""What a CUDA IPC channel asks of CUDA, and the answer of torch and the CUDA runtime; knows nothing of channels.

Memory comes from `cudaMalloc` of the CUDA runtime that torch has loaded, through ctypes. torch's own way to share,
`torch.UntypedStorage._share_cuda_`, does not fit: it is private, hands out the allocator's whole segment, and counts a
reference per export and receiver, so that every new drafter would need a new export and every killed one would keep the
memory for good. The runtime functions used here have kept their signatures since CUDA 5.0.

Events come from `torch.cuda.Event`, whose IPC interface is public and the same in torch 2.11 to 2.13. Tensors are made
over an address by DLPack, where the caller names the device: memory of a peer GPU then counts as memory of the GPU that
mapped it, and kernels of that GPU read it over NVLink or PCIe.
"""

import ctypes
import functools
import time
from typing import Any, ClassVar

import torch
from torch import Tensor

HANDLE_BYTES = 64
"""Of both cudaIpcMemHandle_t and cudaIpcEventHandle_t."""
GRANULARITY_BYTES = 2 * 2**20
"""cudaMalloc carves smaller allocations out of blocks of 2 MiB, and a handle exports the block."""
DRAIN_POLL_S = 1e-3
_LAZY_PEER_ACCESS = 1
_IPC_EVENT_SUPPORT = 125
"""cudaDevAttrIpcEventSupport"""


class CudaError(RuntimeError):
    """A CUDA call failed; one line that names the call, the device and CUDA's own reason."""


class CudaRuntime:
    """CUDA as a channel needs it, by torch and the CUDA runtime library that torch has loaded; a test's fake stands in
    where there is no GPU. Every call may raise CudaError."""

    def count(self) -> int:
        """CUDA devices that this process sees."""
        return torch.cuda.device_count()

    def describe(self, device: torch.device) -> str:
        """The device for people to read: index, name and UUID."""
        return f"cuda:{device.index} ({torch.cuda.get_device_name(device)}, {self.uuid(device)})"

    def uuid(self, device: torch.device) -> str:
        """Name of the GPU in every process, whatever CUDA_VISIBLE_DEVICES says there."""
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def find(self, uuid: str) -> torch.device | None:
        """The GPU of that UUID, or None where this process does not see it."""
        devices = (torch.device("cuda", index) for index in range(self.count()))
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def can_access_peer(self, device: torch.device, peer: torch.device) -> bool:
        """Whether kernels on `device` can use memory of `peer`."""
        return torch.cuda.can_device_access_peer(device, peer)

    def shares_events(self, device: torch.device) -> bool:
        """Whether its events can be opened by other processes, which its memory then can be too."""
        value = ctypes.c_int()
        attribute, index = ctypes.c_int(_IPC_EVENT_SUPPORT), ctypes.c_int(device.index)
        _call(device, "cudaDeviceGetAttribute", ctypes.byref(value), attribute, index)
        return bool(value.value)

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Address of new zeroed memory that can be exported."""
        address = ctypes.c_void_p()
        size = -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        _call(device, "cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        self.tensor(device, _number(address), size).zero_()
        self.current_stream(device).synchronize()  # another stream, or another process, may be the first to use it
        return _number(address)

    def free(self, device: torch.device, address: int) -> None:
        """Free what `allocate` returned; waits for the device's work."""
        _call(device, "cudaFree", ctypes.c_void_p(address))

    def allocation_of(self, device: torch.device, address: int) -> int:
        """Where the allocation begins that an address lies in, whoever has made it."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        driver = _driver()
        with torch.cuda.device(device):
            status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if status:
            raise CudaError(f"cuMemGetAddressRange on cuda:{device.index} failed (CUresult {status})")
        return base.value

    def export_memory(self, device: torch.device, address: int) -> bytes:
        """A handle of the allocation that begins there, which other processes open, HANDLE_BYTES long."""
        handle = _Handle()
        _call(device, "cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open_memory(self, device: torch.device, handle: bytes) -> int:
        """Map another process's memory for use by `device`, which need not be the GPU it lies on; its address here."""
        address = ctypes.c_void_p()
        opened = _Handle.from_buffer_copy(handle)
        _call(device, "cudaIpcOpenMemHandle", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _number(address)

    def close_memory(self, device: torch.device, address: int) -> None:
        """Unmap what `open_memory` returned."""
        _call(device, "cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def tensor(self, device: torch.device, address: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] over memory on, or mapped for, the device; keeps nothing alive."""
        return tensor_at(address, num_bytes, device)

    def create_event(self, device: torch.device) -> torch.cuda.Event:
        """A new interprocess event of the device."""
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            event.ipc_handle()  # an event comes to be when it is first exported, on the device that is current then
        return event

    def open_event(self, device: torch.device, handle: bytes) -> Any:
        """Another process's event, for streams of `device` to wait for and hosts to ask; its maker alone records it."""
        return torch.cuda.Event.from_ipc_handle(device, handle)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The calling thread's stream on the device."""
        return torch.cuda.current_stream(device)

    def drain(self, device: torch.device, stream: Any, timeout_s: float) -> bool:
        """Wait until the stream has done what it was given so far; False if it has not after `timeout_s`."""
        done = torch.cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(DRAIN_POLL_S)
        return True


def _number(address: ctypes.c_void_p) -> int:
    """Of an address; ctypes has None for 0."""
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
        cudart.cudaGetLastError()  # otherwise torch reports this error at its next launch, as that launch's own
        reason = cudart.cudaGetErrorString(status).decode()
        raise CudaError(f"{name} on cuda:{device.index} failed: {reason} (cudaError {status})")


@functools.cache
def _cudart() -> ctypes.CDLL:
    """The CUDA runtime in this process: dlopen finds a library that is loaded by its soname.

    Raises:
        CudaError: torch was built without CUDA, or links its runtime statically.
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


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's own library, which the CUDA runtime has loaded.

    Raises:
        CudaError: it cannot be opened.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the driver's library cannot be opened: {error}") from None


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, followed by the two fields of DLManagedTensor."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DL_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_DL_UINT = 1
_libc = ctypes.CDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] over existing memory, which must outlive every use of it (DLPack 0.8, DLManagedTensor)."""
    shape_at = ctypes.sizeof(_DLTensor)
    # One block for struct and shape, freed by libc itself: the tensor may outlive the interpreter, a callback may not.
    block = _libc.calloc(1, shape_at + 8)
    ctypes.c_int64.from_address(block + shape_at).value = num_bytes
    managed = _DLTensor.from_address(block)
    managed.data, managed.shape = address, block + shape_at
    managed.device_type, managed.device_id = _DL_DEVICE_TYPES[device.type], device.index or 0
    managed.ndim, managed.dtype_code, managed.dtype_bits, managed.dtype_lanes = 1, _DL_UINT, 8, 1
    managed.deleter = ctypes.cast(_libc.free, ctypes.c_void_p).value
    return torch.from_dlpack(_new_capsule(block, b"dltensor", None))
