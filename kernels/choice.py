"""Selection of a compiled GPU kernel or its torch reference, for each call.

A kernel that does not compile on this machine, or whose results differ from its reference, is replaced before any CUDA
graph is captured: see `wingbeat.kernels.gpu.comparison`. The selection holds for the whole process.
"""

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from wingbeat.kernels.parts import hooks, merged_of

KERNELS: dict[str, str] = merged_of(hooks("kernels"))
"""Name of each selectable kernel -> module that defines it. Kernels that share memory between their launches share a
name."""

_replaced: set[str] = set()


def compiled(name: str, tensor: Tensor) -> Any:
    """Returns the module whose kernel runs a call on `tensor`, or None if the torch reference runs it."""
    return module_of(name) if tensor.is_cuda else None


def module_of(name: str) -> Any:
    """Returns the module of a kernel, or None if no such kernel exists or its reference has replaced it."""
    return None if name in _replaced else _module(name)


@cache
def _module(name: str) -> Any:
    """Imports a kernel's module on first use. The result is cached, because every launch calls this function."""
    return import_module(KERNELS[name]) if name in KERNELS else None


def replace(*names: str) -> None:
    """Runs the torch references instead of these kernels from now on.

    Raises:
        ValueError: a name is not in `KERNELS`.
    """
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} does not exist: it must be one of {', '.join(KERNELS)}")
        _replaced.add(name)


def replaced() -> tuple[str, ...]:
    """Names of the kernels that were replaced by their references."""
    return tuple(name for name in KERNELS if name in _replaced)
