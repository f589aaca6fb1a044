"""Optional parts of the runtime: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import; see
`deployments.parts` for those of the application.

- `drafter_kinds()`: each a `drafters.drafter_kind.DrafterKind`.
- `choose_convention(source, target, loaded, tokenizer)`: a choice among the readings that a head's files leave, with
  `best.convention` and `as_dict()`; None where they leave one.
- `family_of_head(folder)`: the family of a head by its files; None for other heads.
- `trained_families()`: the function () -> `training.family.Family`, as `module:function`, by the name of the family.
- `open_backend(settings, device)`: what runs a verifier in the place of torch, with `PairSettings.engine_dir`.
- `open_drafter(settings, device)`: a drafter from the same directory; None for kinds that torch runs.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = (
    *("tensorrt", "ngram", "suffix", "mtp", "one_pass", "assistants", "draft_model", "user_drafter"),
    "conventions",
    *("training.mtp", "training.one_pass"),
)
"""Their folders, in the order in which they are asked."""


@cache
def hooks_of(package: str, parts: Sequence[str], name: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name in the parts of a package that are there."""
    folders = (f"{package}.{part}" for part in parts)
    modules = [import_module(f"{folder}.part") for folder in folders if _is_there(folder)]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def _is_there(folder: str) -> bool:
    try:
        return find_spec(folder) is not None
    except ModuleNotFoundError:  # the folder above it is deleted
        return False


def hooks(name: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name in the parts that are there."""
    return hooks_of(__package__, PARTS, name)


def first(name: str, *given: Any) -> Any:
    """What the first part answers that has an answer; None where none has."""
    return next((answer for hook in hooks(name) if (answer := hook(*given)) is not None), None)


def runs_engines() -> bool:
    """Whether a part runs engine directories."""
    return bool(hooks("open_backend"))


def load_function(path: str) -> Any:
    """The function behind `module:function`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
