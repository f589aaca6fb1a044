"""Tensors of a fake GPU and operations on them: shapes, strides and storages, but no values."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)
_ONE_LAUNCH = {"matmul", "linear", "rms_norm"}


class Meter:
    """Bytes of live storages, as an allocator counts them; off by default, because counting takes time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, on: bool = False) -> None:
        """Count from nothing, or not at all."""
        self.on = on
        self.allocated = self.peak = 0
        self._num_tensors: Counter[int] = Counter()

    def note(self, made: "GpuTensor") -> None:
        """Count a new tensor."""
        key, num_bytes = memory(made), made.meta.untyped_storage().nbytes()
        if not self._num_tensors[key]:
            self.allocated += num_bytes
            self.peak = max(self.peak, self.allocated)
        self._num_tensors[key] += 1
        weakref.finalize(made, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._num_tensors[key] -= 1
        if not self._num_tensors[key]:
            self.allocated -= num_bytes


METER = Meter()


class GpuTensor(torch.Tensor):
    """A tensor that claims to be on cuda:0; shape, strides and storage are those of a tensor on "meta"."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: Tensor) -> "GpuTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=CUDA
        )
        made.meta = meta
        if METER.on:
            METER.note(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a tensor of a fake GPU that is gone")

    def tolist(self) -> list:
        """Values as a list, which waits like any copy to the host."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Address: a multiple of 256 for each storage, as CUDA's allocator gives it."""
        return memory(self) * 256 + self.storage_offset() * self.element_size()


@cache
def name_of(func: Any) -> str:
    """An operation's name, without its overload."""
    return func._schema.name.removeprefix("aten::")


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation has no GPU kernel and is therefore decomposed into others."""
    return name_of(func) not in _ONE_LAUNCH and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


_results: dict[tuple, Any] = {}
"""Results of operations by argument shapes: torch's own shape rules take ten times as long."""


def run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the "meta" tensors; an argument that it writes to stays the same object."""
    if func.is_view:
        # A view must be an inference tensor exactly if its base is, whatever the current mode.
        with torch.inference_mode(args[0].is_inference()):
            return _mapped(func(*_mapped(args, _behind), **_mapped(kwargs, _behind)), _on_device)
    key = (func, _mapped_key(args), _mapped_key(kwargs))
    if key not in _results:
        _results[key] = func(*_mapped(args, _behind), **_mapped(kwargs, _behind))
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    return _mapped(_results[key], lambda value: _on_device(_like(value)))


def _like(value: Any) -> Any:
    """New memory for a cached result."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_device(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) else value


def _mapped_key(values: Any) -> Any:
    if isinstance(values, Tensor):
        return type(values), values.dtype, values.shape, values.stride()
    if isinstance(values, list | tuple):
        return tuple(_mapped_key(value) for value in values)
    if isinstance(values, dict):
        return tuple((name, _mapped_key(value)) for name, value in values.items())
    return type(values), values


def _behind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.meta if isinstance(value, GpuTensor) else value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _mapped(values: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(values, list | tuple):
        return type(values)(_mapped(value, function) for value in values)
    if isinstance(values, dict):
        return {name: _mapped(value, function) for name, value in values.items()}
    return function(values)


def memory(tensor: Tensor) -> int:
    """Address that tensors of a storage share, and that differs from other living storages'."""
    behind = tensor.meta if isinstance(tensor, GpuTensor) else tensor
    return behind.untyped_storage()._cdata


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors among arguments."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))
