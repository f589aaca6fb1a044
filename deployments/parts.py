"""Optional parts of the application: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import; `python -m tests.without NAME`
takes a part out.

- `add_commands(app, open_engine)`: commands of `wingbeat`, see `cli.main`.
- `add_routes(app, models, drafter)`: routes of the HTTP application, see `api.routes`.
- `bodies()`: what is posted to these routes, by path.
- `error_body(path, error)`: an error's body below these routes, where it has a form of its own.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = ("doctor", "api.responses_api", "api.messages_api", "page")
"""Their folders, in the order in which they add."""


@cache
def hooks(name: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name in the parts that are there."""
    folders = (f"{__package__}.{part}" for part in PARTS)
    modules = [import_module(f"{folder}.part") for folder in folders if find_spec(folder) is not None]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))
