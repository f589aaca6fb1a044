"""Python interface of `native.h`, which adds adapters to the matrix products of `wingbeat.kernels.cpu`."""

import ctypes
from ctypes import POINTER, Structure, c_int64, c_void_p

from torch import Tensor

from wingbeat.kernels.cpu.ops import Addition, CpuKernels
from wingbeat.kernels.cpu.structs import KINDS
from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters


class Adapters(Structure):
    """Low-rank adapters of one matrix product, or of a few matrix products with the same inputs."""

    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("ranks", c_void_p),
        ("a_stride", c_int64),
        ("a_row", c_int64),
        ("b_stride", c_int64),
        ("b_row", c_int64),
        ("inputs", c_int64),
        ("rank", c_int64),
        ("num_parts", c_int64),
        ("columns", c_int64 * 3),
        ("kind", c_int64),
    ]


class AdapterRun(Structure):
    """Consecutive rows of a batch that have the same adapter."""

    _fields_ = [("id", c_int64), ("begin", c_int64), ("end", c_int64)]


class AdapterRuns(Structure):
    """All runs of a batch."""

    _fields_ = [("runs", POINTER(AdapterRun)), ("num_runs", c_int64)]


def adapt(kernels: CpuKernels, out: Tensor, x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> None:
    """Runs `wingbeat.kernels.lora.adapters.add_adapters` for contiguous rows in the adapters' dtype."""
    runs, made = runs_of(rows), adapters_of(adapters)
    wide, inputs, adds = out.float(), x.float(), kernels.library.wingbeat_adapt
    adds.argtypes = [POINTER(Adapters), POINTER(AdapterRun), c_int64, c_void_p, c_void_p, c_int64]
    adds.restype = None
    adds(ctypes.byref(made), runs, len(runs), inputs.data_ptr(), wide.data_ptr(), out.shape[-1])
    if wide is not out:
        out.copy_(wide)


def addition_of(kernels: CpuKernels, rows: AdapterRows) -> Addition | None:
    """Returns the function, with its arguments, that adds these rows' adapters to the matrix products of decoder
    layers. None if no row has an adapter.
    """
    if not rows.runs:
        return None
    runs = runs_of(rows)
    return Addition(ctypes.cast(kernels.library.wingbeat_add_adapters, c_void_p).value, AdapterRuns(runs, len(runs)))


def runs_of(rows: AdapterRows) -> ctypes.Array:
    """Converts the runs of rows with equal adapters to the C++ format."""
    return (AdapterRun * len(rows.runs))(*rows.runs)


def adapters_of(adapters: StackedAdapters) -> Adapters:
    """Describes the adapters of one product for the C++. The caller keeps the tensors alive.

    Raises:
        ValueError: the adapters are not on the CPU, or have a dtype outside `KINDS`.
    """
    a, b, parts = adapters.a, adapters.b, adapters.parts
    if a.dtype not in KINDS or a.device.type != "cpu":
        raise ValueError(f"adapters are {a.dtype} on {a.device}: float32, bfloat16 or float16 on the CPU needed")
    return Adapters(
        a.data_ptr(),
        b.data_ptr(),
        adapters.ranks.data_ptr(),
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        a.shape[1],
        adapters.rank,
        len(parts),
        (ctypes.c_int64 * 3)(*parts),
        KINDS[a.dtype],
    )
