"""A GPU of shapes alone: tensors on cuda:0 in a torch without CUDA, so that the CUDA branches run on any machine.

Nothing is computed; only requests to a GPU are observed: every launch is counted, and every wait of the host, every mix
of host and device memory and every shape that depends on data is an error at the line that causes it.
"""

import ctypes
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import include_paths, library_paths

from tests.runtime.fake_gpu_tensor import CUDA, METER, GpuTensor, is_composite, memory, name_of, run, tensors_in
from wingbeat.kernels import choice
from wingbeat.runtime.protocol.transfer import Download

FREE_BYTES = 70 << 30
CARD = {
    "name": "fake",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": FREE_BYTES,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
}
"""An H100's properties, as torch names them."""
REGISTERS = 128
"""Registers per thread of every compiled kernel; likewise `SHARED_BYTES` per program."""
SHARED_BYTES = 72 << 10

# Indexing asks for a device guard, which a torch without CUDA has none of.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
"""
_ANSWERS = {"_local_scalar_dense": 0, "item": 0, "is_nonzero": False, "equal": False}
"""Operations that read a value from the device, and the value that they return before the first round."""
_SHAPES_BY_VALUE = {"nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
_NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
_LAUNCH_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"}
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


class HostWaitError(RuntimeError):
    """The host waits for the device where it must not."""


class MixedDevicesError(RuntimeError):
    """Host memory is handed to an operation of the device."""


@cache
def why_not() -> str | None:
    """Reason why this machine has no fake GPU, or None; the first call registers the device guard."""
    if torch.cuda.is_available():
        return "this machine has a real GPU"
    compiler = next(
        (path for name in (os.environ.get("CXX"), "c++", "g++") if name and (path := shutil.which(name))), ""
    )
    if not compiler:
        return "no C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD)
        paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        command = [compiler, "-std=c++20", "-shared", "-fPIC", *paths, str(source), "-o", str(library), "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the device guard does not compile: {done.stderr.splitlines()[0]}"
        ctypes.CDLL(str(library))
    return None


class FakeGpu(TorchDispatchMode):
    """While entered, cuda:0 exists. Waits are errors while `strict` is set, except within the functions `waits_in`."""

    def __init__(self) -> None:
        super().__init__()
        self.strict = self.capturing = False
        self.waits_in: set[CodeType] = {Download.wait.__code__}
        self.launches: Counter[str] = Counter()
        """Number of launches by name of the operation or kernel; a replayed graph is one launch."""
        self.variants: set[tuple] = set()
        """Launched kernels, each with the types and constants that it is compiled for."""
        self._pinned: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **(kwargs | {"pin_memory": False})))
        tensors = list(tensors_in((args, kwargs)))
        on_device = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        # Where operations are not decomposed, `to` itself arrives here, with its device by position.
        target = kwargs.get("device", next((value for value in args if isinstance(value, torch.device)), None))
        if not on_device and (target is None or torch.device(target).type != "cuda"):
            return func(*args, **kwargs)
        if func.namespace == "c10d":  # a collective, whose result depends on other processes
            self.launches[name_of(func)] += 1
            return args[0], FakeWork().boxed()
        name = name_of(func)
        if name == "prim::device":
            return CUDA
        if name == "dropout" and not args[2]:  # torch's kernel returns its input, torch's decomposition copies it
            return args[0]
        if is_composite(func):  # inference mode skips the dispatch layer that decomposes these
            with self:
                return func.decompose(*args, **kwargs)
        if name == "copy_":
            return self._copy_into(func, *args, **kwargs)
        if name == "_to_copy" and target is not None and torch.device(target).type != args[0].device.type:
            return self._copy_to(args[0], kwargs.get("dtype") or args[0].dtype)
        if name in _ANSWERS:
            self._wait(f"{name} asks the device for a value")
            return _ANSWERS[name]
        if name == "_foreach_copy_":
            return self._copy_all(*args)
        self._check_operands(func, name, tensors, args)
        if name == "_grouped_mm" and not self._has_grouped(args[0]):
            self._wait("_grouped_mm copies the groups' ends to the host, on such a card or in such a dtype")
        if not func.is_view and name not in _NO_LAUNCH:
            self.launches[name] += 1
        return run(func, args, kwargs)

    def launch(self, kernel: Any, grid: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check and count a Triton kernel's launch.

        Whether products and sums are fused must be said, which versions of Triton do by default or do not.
        """
        if "enable_fp_fusion" not in kwargs:
            raise ValueError(f"the launch of {kernel.__name__} leaves enable_fp_fusion to Triton")
        given = {name: value for name, value in kwargs.items() if name not in _LAUNCH_OPTIONS}
        bound = inspect.signature(kernel.fn).bind(*args, **given)
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor) and not isinstance(value, GpuTensor):
                raise MixedDevicesError(f"{name} of {kernel.__name__} is on the host")
        grid = grid(given) if callable(grid) else grid
        self.variants.add(_variant(kernel, bound.arguments))
        for size, most in zip(grid, _MOST_PROGRAMS, strict=False):
            if type(size) is not int or not 0 < size <= most:
                raise ValueError(f"grid of {kernel.__name__} is {grid}")
        self.launches[kernel.__name__] += 1

    def compile(self, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Stands for `warmup` of a Triton kernel: it is compiled and not launched."""
        given = {name: value for name, value in kwargs.items() if name not in _LAUNCH_OPTIONS}
        self.variants.add(_variant(kernel, inspect.signature(kernel.fn).bind(*args, **given).arguments))
        metadata = SimpleNamespace(shared=SHARED_BYTES, tmem_size=None)
        return SimpleNamespace(metadata=metadata, n_regs=REGISTERS, run=None)

    def _check_operands(self, func: Any, name: str, tensors: list[Tensor], args: tuple) -> None:
        indexes = name.lstrip("_").startswith("index") and isinstance(args[1], list | tuple)
        indices = [index for index in args[1] if index is not None] if indexes else []
        if name in _SHAPES_BY_VALUE:
            raise HostWaitError(f"{name} has a shape that only the device knows")
        if any(index.dtype == torch.bool for index in indices):
            raise HostWaitError(f"{name} by a mask has a shape that only the device knows")
        of_host = [] if name == "empty_like" else [one for one in tensors if not isinstance(one, GpuTensor)]
        if any(tensor.dim() > 0 or any(tensor is index for index in indices) for tensor in of_host):
            raise MixedDevicesError(f"{name} gets {[tuple(tensor.shape) for tensor in of_host]} from the host")

    @staticmethod
    def _has_grouped(rows: Tensor) -> bool:
        """Whether ATen has a kernel for grouped products; without one they wait for the host and cannot be captured."""
        return (CARD["major"], CARD["minor"]) in ((9, 0), (10, 0)) and rows.dtype == torch.bfloat16

    def _copy_into(self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(target, GpuTensor):
            self._download(target if non_blocking else None)
            # A number that is valid as a token, a length and an index.
            return target.copy_(torch.ones_like(source.meta, device="cpu"))
        if not isinstance(source, GpuTensor):
            self._upload(source)
        func(target.meta, source.meta if isinstance(source, GpuTensor) else source.to("meta"))
        self.launches["copy_"] += 1
        return target

    def _copy_all(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Count a launch for tensors of equal layout, as torch does, else a launch per tensor."""
        pairs = list(zip(targets, sources, strict=True))
        if not all(isinstance(part, GpuTensor) for pair in pairs for part in pair):
            raise MixedDevicesError("_foreach_copy_ gets tensors from the host")
        kinds = {part.dtype for pair in pairs for part in pair}
        alike = all((target.shape, target.stride()) == (source.shape, source.stride()) for target, source in pairs)
        self.launches["_foreach_copy_"] += 1 if alike and len(kinds) == 1 else len(pairs)

    def _copy_to(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(source, GpuTensor):
            self._download(None)
            return torch.zeros(source.shape, dtype=dtype)
        self._upload(source)
        self.launches["copy_"] += 1
        return GpuTensor(torch.empty(source.shape, dtype=dtype, device="meta"))

    def _upload(self, source: Tensor) -> None:
        if self.capturing:
            raise MixedDevicesError("an upload is captured")
        if memory(source) not in self._pinned:
            self._wait("an upload from pageable memory")

    def _download(self, into: Tensor | None) -> None:
        if self.capturing:
            raise MixedDevicesError("a download is captured")
        if into is None or memory(into) not in self._pinned:
            self._wait("a copy to the host")
        self.launches["copy_"] += 1

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[memory(tensor)] = tensor  # kept alive, so that no other tensor gets the same address
        return tensor

    def _wait(self, what: str) -> None:
        if self.capturing:
            raise HostWaitError(f"{what}, in a capture")
        frame = sys._getframe(1)
        while self.strict and frame is not None:
            if frame.f_code in self.waits_in:
                return
            frame = frame.f_back
        if self.strict:
            raise HostWaitError(what)

    @contextmanager
    def capture(self) -> Iterator[Counter[str]]:
        """Capture the launches within the block, which must not touch the host."""
        before, self.launches, self.capturing = self.launches, Counter(), True
        try:
            yield self.launches
        finally:
            self.launches, self.capturing = before, False

    def event(self) -> Any:
        """Stands for `torch.cuda.Event`."""

        def synchronize() -> None:
            self._wait("an event")

        return SimpleNamespace(
            record=lambda: None, query=lambda: True, synchronize=synchronize, elapsed_time=lambda end: 1.0
        )

    def make_tensor(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap `torch.tensor`, whose allocation no dispatch mode sees."""

        def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
            made = make(data, **options)
            if pin_memory:
                refuse_arrays(data)
                return self._pin(made)
            return made if device is None else made.to(device)

        return tensor


def refuse_arrays(data: Any) -> None:
    """Raise as `torch.tensor(data, pin_memory=True)` does where there is a GPU; a torch without CUDA accepts arrays."""
    if isinstance(data, np.ndarray):
        raise RuntimeError("Can't pin tensor constructed from numpy")


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Enter the mode, with replacements for the parts of torch and Triton that need a GPU."""
    from triton.runtime.jit import KernelInterface

    attention = choice.module_of("attention")
    gpu = FakeGpu()
    of_device = {
        "Event": lambda enable_timing=False: gpu.event(),
        "_lazy_init": lambda: None,
        "device_of": lambda tensor: nullcontext(),
        "get_device_name": lambda device=None: "fake",
        "get_device_properties": lambda device=None: SimpleNamespace(**CARD),
        "get_device_capability": lambda device=None: (CARD["major"], CARD["minor"]),
        "mem_get_info": lambda device=None: (FREE_BYTES, FREE_BYTES),
        "memory_allocated": lambda device=None: METER.allocated,
        "max_memory_allocated": lambda device=None: METER.peak,
        "memory_reserved": lambda device=None: METER.allocated,
        "reset_peak_memory_stats": lambda device=None: setattr(METER, "peak", METER.allocated),
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: gpu._wait("torch.cuda.synchronize"),
    }
    # torch caches the functions that `torch.device` as a context acts on; the cache must hold the original ones.
    torch.utils._device._device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in of_device.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "tensor", gpu.make_tensor(torch.tensor))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu._pin(tensor.clone()))
        patch.setattr(
            KernelInterface,
            "__getitem__",
            lambda kernel, grid: lambda *args, **kwargs: gpu.launch(kernel, grid, args, kwargs),
        )
        patch.setattr(
            KernelInterface, "warmup", lambda kernel, *args, grid, **kwargs: gpu.compile(kernel, args, kwargs)
        )
        if attention is not None:
            patch.setattr(attention, "_RESIDENT", {})
            attention.device_limits.cache_clear()
        try:
            with gpu:
                yield gpu
        finally:
            if attention is not None:
                attention.device_limits.cache_clear()


@torch.no_grad()
def place(module: nn.Module) -> nn.Module:
    """Move a module to the fake GPU in bfloat16."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                dtype = torch.bfloat16 if parameter.is_floating_point() else parameter.dtype
                there = torch.empty(parameter.shape, dtype=dtype, device=CUDA)
                part._parameters[name] = nn.Parameter(there, requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                setattr(part, name, torch.empty(value.shape, dtype=value.dtype, device=CUDA))
            elif isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
                like = (
                    torch.empty(each.shape, dtype=each.dtype, device=CUDA) if isinstance(each, Tensor) else each
                    for each in value
                )
                part.__dict__[name] = tuple(like)
    for part in module.modules():
        if hasattr(part, "join"):  # products with the same input share one joined weight
            part.join()
    return module


def _variant(kernel: Any, arguments: dict[str, Any]) -> tuple:
    """Key of a compiled kernel: its constants, its types, and the integers' properties on which Triton specialises."""
    # Triton's interpreter keeps what the decorator was given, its compiler what it made of it.
    given = kernel.kwargs.get("do_not_specialize") if hasattr(kernel, "kwargs") else kernel.do_not_specialize
    free = set(given or ())
    variant: list[Any] = [kernel.__name__]
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        value = arguments[name]
        if "constexpr" in str(parameter.annotation) or value is None or isinstance(value, torch.dtype):
            variant.append(value)
        elif isinstance(value, Tensor):
            variant.append(value.dtype)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = "i32" if -(2**31) <= value < 2**31 else "i64"
            variant.append((name, size, None if name in free else (value == 1, value % 16 == 0)))
    return tuple(variant)
