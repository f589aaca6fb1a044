"""The device of device.cpp from Python: real tensors on cuda:0 whose memory is the host's, counted as allocators count.

Loading it is for good: a process that has done so has a device "cuda", which tests of other things do not expect.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from tests.native import compiled_library

CUDA = torch.device("cuda", 0)
ON_THE_HOST = ("scaled_dot_product_attention",)
"""Operations made of others by torch, in a way that ends in its own kernels of CUDA."""
_SOURCE = Path(__file__).with_name("device.cpp")
_KERNELS = torch.library.Library("aten", "IMPL")
"""Library of operations that torch implements for CUDA only."""


@cache
def load() -> ctypes.CDLL:
    """Bring the device into this process; its counters of memory.

    Raises:
        RuntimeError: there is no C++ compiler, or a real GPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a real GPU")
    names = ",".join(f'"{name}"' for name in ON_THE_HOST)
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-DON_THE_HOST={names}"]
    flags += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    path = compiled_library("gpu-of-numbers", [_SOURCE], [*flags, "-lc10", "-ltorch_cpu"], [torch.__version__.encode()])
    torch.ops.load_library(str(path))
    _KERNELS.impl("mm.dtype", _product, "CUDA")
    _KERNELS.impl("mm.dtype_out", _product_into, "CUDA")
    _KERNELS.impl("_conv_depthwise2d", _depthwise, "CUDA")
    library = ctypes.CDLL(str(path))
    library.gpu_allocated.restype = library.gpu_peak.restype = ctypes.c_int64
    library.gpu_limit.argtypes = [ctypes.c_int64]
    return library


def _product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch.mm with `out_dtype`, which as on CUDA is float32 of halves."""
    if out_dtype != torch.float32 or {left.dtype, right.dtype} not in ({torch.bfloat16}, {torch.float16}):
        raise RuntimeError(f"mm of {left.dtype} and {right.dtype} has no out_dtype {out_dtype}")
    return torch.mm(left.float(), right.float())


def _product_into(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(_product(left, right, out_dtype))


def _depthwise(
    inputs: Tensor, weight: Tensor, kernel_size: Any, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Convolution of each channel by itself, of stride and dilation 1, which torch has a kernel for on CUDA alone."""
    if {*stride, *dilation} != {1}:
        raise RuntimeError(f"a depthwise convolution of stride {stride} and dilation {dilation}")
    padded = torch.nn.functional.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
    around = padded.unfold(2, kernel_size[0], 1).unfold(3, kernel_size[1], 1)
    out = (around * weight[:, 0, None, None]).sum((-2, -1))
    return out if bias is None else out + bias[:, None, None]


def on_host(value: Tensor) -> Tensor:
    """A host tensor over the memory of a device tensor; any other tensor as it is."""
    return torch.ops.gpu_of_numbers.host(value) if value.is_cuda else value


def borrowed(value: Tensor) -> Tensor:
    """A device tensor over the same memory, which it does not keep alive."""
    return torch.ops.gpu_of_numbers.borrowed(value)


def poison(value: Tensor) -> None:
    """Make the whole memory behind a tensor NaN, and no index."""
    storage = value.untyped_storage()
    if storage.nbytes():
        ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
