"""Torch's operations, where the C++ of CPUs would run in their place."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar
from unittest.mock import patch

from wingbeat.runtime import parts

Value = TypeVar("Value")


def without_cpu() -> AbstractContextManager:
    """Context manager in which nothing finds the C++: a part is chosen where something is made."""
    return patch.object(parts, "PARTS", tuple(part for part in parts.PARTS if part.partition(".")[0] != "cpu"))


def by_torch(function: Callable[[], Value]) -> Value:
    """Result of a function that makes what it runs, without the C++."""
    with without_cpu():
        return function()
