"""Optional parts of the kernels: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import: a function or a value, or
the path `module:name` of one that is imported when it is first asked for. See `runtime.parts` for those of the runtime.

- `kernels`: modules of its compiled kernels by name, as `choice.KERNELS`.
- `cases`: each of them held against its reference, as `gpu.comparison.CASES`.
- `replace_wrong(device, shape)`: runs references in the place of kernels that differ from them, and returns those.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = ("gpu", "lora", "state", "packed", "alike")
"""Their folders, in the order in which they add."""


@cache
def hooks_of(package: str, parts: Sequence[str], name: str) -> tuple[Any, ...]:
    """Hooks of that name in the parts of a package that are there."""
    folders = (f"{package}.{part}" for part in parts)
    modules = [import_module(f"{folder}.part") for folder in folders if _is_there(folder)]
    found = (getattr(module, name) for module in modules if hasattr(module, name))
    return tuple(load_function(hook) if isinstance(hook, str) else hook for hook in found)


def load_function(path: str) -> Any:
    """Value behind `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def merged_of(hooks: Sequence[Any], given: tuple[Any, ...] = ()) -> dict[str, Any]:
    """All entries of mappings, or of those that functions make of what is given."""
    return {key: value for hook in hooks for key, value in (hook(*given) if given else hook).items()}


def _is_there(folder: str) -> bool:
    try:
        return find_spec(folder) is not None
    except ModuleNotFoundError:  # the folder above it is deleted
        return False


def hooks(name: str) -> tuple[Any, ...]:
    """Hooks of that name in the parts that are there."""
    return hooks_of(__package__, PARTS, name)
