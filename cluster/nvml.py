"""NVIDIA's management library as far as a start asks it: which GPUs there are and what is used of them.

It makes no CUDA context, which torch could, and takes milliseconds, where an import of torch takes seconds.
"""

import ctypes
from typing import ClassVar, NamedTuple, Protocol

LIBRARY = "libnvidia-ml.so.1"
"""Comes with the driver; under WSL2 too."""
_TEXT_BYTES = 96


class NvmlError(RuntimeError):
    """The library is not there or does not answer; one line with its own reason."""


class Device(NamedTuple):
    """A GPU as the library describes it."""

    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    is_divided: bool
    """Into MIG instances, of which a process sees one."""


class Nvml(Protocol):
    """What a test's fake stands in for. Every call may raise NvmlError."""

    def driver_version(self) -> str:
        """Such as 580.65.06."""
        ...

    def devices(self) -> list[Device]:
        """All GPUs of the machine, in the order of their indices; what CUDA_VISIBLE_DEVICES hides is among them."""
        ...


class LibraryNvml:
    """`Nvml` by the library.

    Raises:
        NvmlError: it cannot be opened, or the driver does not answer.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(f"{LIBRARY} cannot be opened: {error}") from None
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def driver_version(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def devices(self) -> list[Device]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> Device:
        handle, memory = ctypes.c_void_p(), _Memory()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        uuid, name = (self._text(call, handle) for call in ("nvmlDeviceGetUUID", "nvmlDeviceGetName"))
        return Device(uuid, name, memory.total, memory.used, self._is_divided(handle))

    def _is_divided(self, handle: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        except NvmlError:  # most kinds of GPUs have no such mode
            return False
        return bool(current.value)

    def _text(self, name: str, *arguments: object) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(name, *arguments, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode()

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise NvmlError(f"{LIBRARY} has no {name}") from None
        if status:
            raise NvmlError(f"{name} failed: {self._library.nvmlErrorString(status).decode()}")


class _Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_: ClassVar = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]
