"""Machines with GPUs, or without NVIDIA's management library, that exist only in the tests: pynvml's functions."""

from types import SimpleNamespace
from typing import NoReturn

import pynvml
import pytest

from wingbeat.cluster.nvml import Device

GIB = 1 << 30


def install(monkeypatch: pytest.MonkeyPatch, *devices: Device, driver: str = "580.65.06") -> None:
    """Install NVML of a machine with these GPUs, each its own handle; GPUs that are not divided have no MIG mode."""

    def mig_mode(device: Device) -> list[int]:
        if not device.is_divided:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    functions = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: driver,
        "nvmlDeviceGetCount": lambda: len(devices),
        "nvmlDeviceGetHandleByIndex": lambda index: devices[index],
        "nvmlDeviceGetUUID": lambda device: device.uuid,
        "nvmlDeviceGetName": lambda device: device.name,
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(total=device.total_bytes, used=device.used_bytes),
        "nvmlDeviceGetMigMode": mig_mode,
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the library."""

    def missing() -> NoReturn:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)


def device(number: int, used_gib: float = 0.5, is_divided: bool = False) -> Device:
    """A GPU of 80 GiB."""
    return Device(f"GPU-{number}{number}", "NVIDIA H100", 80 * GIB, int(used_gib * GIB), is_divided)
