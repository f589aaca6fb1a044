"""Python's side of `native.h`: adapters on top of products of `wingbeat.kernels.cpu`."""

import ctypes
from ctypes import POINTER, Structure, c_int64, c_void_p

from torch import Tensor

from wingbeat.kernels.cpu.ops import Addition, CpuKernels
from wingbeat.kernels.cpu.structs import KINDS
from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters


class Adapters(Structure):
    """Low-rank adapters of one product, or of a few of the same inputs."""

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
    """Rows of a batch, one behind the other, that have the same adapter."""

    _fields_ = [("id", c_int64), ("begin", c_int64), ("end", c_int64)]


class AdapterRuns(Structure):
    """All runs of a batch."""

    _fields_ = [("runs", POINTER(AdapterRun)), ("num_runs", c_int64)]


def adapt(kernels: CpuKernels, out: Tensor, x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> None:
    """`wingbeat.kernels.lora.adapters.add_adapters` of contiguous rows, in the dtype of the adapters."""
    runs, made = runs_of(rows), adapters_of(adapters)
    wide, inputs, adds = out.float(), x.float(), kernels.library.wingbeat_adapt
    adds.argtypes = [POINTER(Adapters), POINTER(AdapterRun), c_int64, c_void_p, c_void_p, c_int64]
    adds.restype = None
    adds(ctypes.byref(made), runs, len(runs), inputs.data_ptr(), wide.data_ptr(), out.shape[-1])
    if wide is not out:
        out.copy_(wide)


def addition_of(kernels: CpuKernels, rows: AdapterRows) -> Addition | None:
    """Addition of layers to their products for these rows; None where no row has an adapter."""
    if not rows.runs:
        return None
    runs = runs_of(rows)
    return Addition(ctypes.cast(kernels.library.wingbeat_add_adapters, c_void_p).value, AdapterRuns(runs, len(runs)))


def runs_of(rows: AdapterRows) -> ctypes.Array:
    """Which rows have which adapter."""
    return (AdapterRun * len(rows.runs))(*rows.runs)


def adapters_of(adapters: StackedAdapters) -> Adapters:
    """Adapters of one product; whoever holds it holds the tensors.

    Raises:
        ValueError: they are of no dtype of `KINDS` on the CPU.
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
