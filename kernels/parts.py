"""Registry of the optional parts of the kernels: folders that can be deleted without a change to any other file.

A part's module `part` defines hooks under the names below. Each hook is a function, a value, or a string `module:name`
that is imported on first use, so that importing `part` stays cheap. `runtime.parts` lists the runtime's hooks.

- `kernels`: kernel name -> module, merged into `choice.KERNELS`.
- `cases`: comparisons of these kernels with their references, merged into `gpu.comparison.CASES`.
- `replace_wrong(device, shape)`: replaces kernels that differ from their references, and returns their names.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = ("gpu", "few_rows", "experts", "lora", "state", "packed", "alike", "latent_attention")
"""Folders of the parts, in the order in which their hooks are applied."""


@cache
def hooks_of(package: str, parts: Sequence[str], name: str) -> tuple[Any, ...]:
    """Returns the hooks called `name` of all installed parts of a package."""
    folders = (f"{package}.{part}" for part in parts)
    modules = [import_module(f"{folder}.part") for folder in folders if _is_there(folder)]
    found = (getattr(module, name) for module in modules if hasattr(module, name))
    return tuple(load_function(hook) if isinstance(hook, str) else hook for hook in found)


def load_function(path: str) -> Any:
    """Imports the object that `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def merged_of(hooks: Sequence[Any], given: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Merges mappings, or the mappings that functions return when called with `given`, into one."""
    return {key: value for hook in hooks for key, value in (hook(*given) if given else hook).items()}


def _is_there(folder: str) -> bool:
    try:
        return find_spec(folder) is not None
    except ModuleNotFoundError:  # the parent folder is deleted
        return False


def hooks(name: str) -> tuple[Any, ...]:
    """Returns the hooks called `name` of all installed parts of the kernels."""
    return hooks_of(__package__, PARTS, name)
