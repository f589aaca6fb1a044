"""Choice between a compiled kernel and the torch reference beside it, for each call on a GPU.

A kernel that does not compile here, or computes other numbers than its reference, is replaced before anything is
captured: see `wingbeat.kernels.gpu.comparison`. The choice holds for the process.
"""

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from wingbeat.kernels.parts import hooks, merged_of

KERNELS: dict[str, str] = merged_of(hooks("kernels"))
"""The names that are chosen by, of what is launched for one call or for calls that share their memory; each with the
module that has it."""

_replaced: set[str] = set()


def compiled(name: str, tensor: Tensor) -> Any:
    """The module whose kernel a call on a tensor runs; None where the reference runs."""
    return module_of(name) if tensor.is_cuda else None


def module_of(name: str) -> Any:
    """The module that has a kernel; None where there is none, or its reference runs on GPUs too."""
    return None if name in _replaced else _module(name)


@cache
def _module(name: str) -> Any:
    """Asked at every launch, and imported once."""
    return import_module(KERNELS[name]) if name in KERNELS else None


def replace(*names: str) -> None:
    """Run references in the place of these kernels from now on.

    Raises:
        ValueError: there is no such kernel.
    """
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} is none of {', '.join(KERNELS)}")
        _replaced.add(name)


def replaced() -> tuple[str, ...]:
    """Kernels whose references run."""
    return tuple(name for name in KERNELS if name in _replaced)
