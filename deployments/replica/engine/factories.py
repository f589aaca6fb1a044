"""Loads functions that a configuration names as `module:function`."""

import importlib
from collections.abc import Callable
from typing import Any


def load_factory(path: str) -> Callable[..., Any]:
    """Return the function that a `module:function` path names.

    Raises:
        ValueError: there is no such module or function; the message names the path.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"factory {path!r} cannot be loaded: {error}") from error
