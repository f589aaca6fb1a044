"""Optional parts of the runtime: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import; see
`deployments.parts` for those of the application.

- `text_drafters()`: drafters that continue earlier text, by name, as `drafters.registry.KINDS`.
- `remembering_drafters()`: names of those whose drafts may come from other requests' texts.
- `grammars(tokenizer, vocab_size, eos_token_ids)`: compiles what answers must match, see `scheduling.maskers`.
- `open_backend(settings, device)`: what runs a verifier in the place of torch, with `PairSettings.engine_dir`.
- `open_drafter(settings, device)`: a drafter from the same directory; None for kinds that torch runs.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = ("tensorrt", "suffix", "grammar")
"""Their folders, in the order in which they are asked."""


@cache
def hooks_of(package: str, parts: Sequence[str], name: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name in the parts of a package that are there."""
    folders = (f"{package}.{part}" for part in parts)
    modules = [import_module(f"{folder}.part") for folder in folders if find_spec(folder) is not None]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def hooks(name: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name in the parts that are there."""
    return hooks_of(__package__, PARTS, name)


def first(name: str, *given: Any) -> Any:
    """What the first part answers that has an answer; None where none has."""
    return next((answer for hook in hooks(name) if (answer := hook(*given)) is not None), None)


def runs_engines() -> bool:
    """Whether a part runs engine directories."""
    return bool(hooks("open_backend"))
