"""NVIDIA's management library (NVML): GPUs, memory in use, and driver version, as needed at startup.

NVML is used instead of torch, because NVML creates no CUDA context and takes milliseconds, while importing torch takes
seconds.
"""

from typing import Any, NamedTuple

import pynvml
from pynvml import NVMLError


class Device(NamedTuple):
    """A GPU as NVML describes it."""

    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    is_divided: bool
    """Whether the GPU is divided into MIG instances; a process sees only one of these."""


def driver_version() -> str:
    """Version of the driver, such as 580.65.06.

    Raises:
        NVMLError: the library is missing, or the driver does not answer; the message is one line with the reason.
    """
    pynvml.nvmlInit()
    return pynvml.nvmlSystemGetDriverVersion()


def devices() -> list[Device]:
    """All GPUs of the machine in the order of their indices, including those that CUDA_VISIBLE_DEVICES hides.

    Raises:
        NVMLError: as in `driver_version`.
    """
    pynvml.nvmlInit()
    return [_device(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]


def _device(handle: Any) -> Device:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        is_divided = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except NVMLError:  # most GPUs do not support MIG
        is_divided = False
    return Device(uuid, name, int(memory.total), int(memory.used), is_divided)
