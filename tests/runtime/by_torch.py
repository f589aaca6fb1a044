"""Torch's operations in place of the C++ kernels of the CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar
from unittest.mock import patch

from wingbeat.runtime import parts

Value = TypeVar("Value")


def without_cpu() -> AbstractContextManager:
    """Return a context manager that hides the C++ kernels from anything that is built within it."""
    return patch.object(parts, "PARTS", tuple(part for part in parts.PARTS if part.partition(".")[0] != "cpu"))


def by_torch(function: Callable[[], Value]) -> Value:
    """Call a function that builds drafters or models, with the C++ kernels hidden from it."""
    with without_cpu():
        return function()
