"""The driver's library has one door, and every refusal is one line."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from wingbeat.kernels import cuda_driver
from wingbeat.kernels.cuda_driver import CudaError, call_driver

ROOT = Path(__file__).parents[2]


def test_the_driver_is_opened_by_one_file():
    sources = (
        path for room in ("kernels", "runtime", "cluster", "deployments") for path in ROOT.glob(f"{room}/**/*.py")
    )
    [file] = [path for path in sources if "libcuda." in path.read_text(encoding="utf-8")]
    assert file == ROOT / "kernels" / "cuda_driver.py"


def test_a_refused_call_names_itself_and_the_drivers_reason(monkeypatch):
    def reason_of(status, to):
        ctypes.cast(to, ctypes.POINTER(ctypes.c_char_p))[0] = b"out of memory" if status == 2 else None

    driver = SimpleNamespace(cuMemCreate=lambda status: status, cuGetErrorString=reason_of)
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    call_driver("cuMemCreate", 0)
    with pytest.raises(CudaError, match=r"^cuMemCreate failed: out of memory \(CUresult 2\)$"):
        call_driver("cuMemCreate", 2)
    with pytest.raises(CudaError, match=r"^cuMemCreate failed: unknown error \(CUresult 3\)$"):
        call_driver("cuMemCreate", 3)
