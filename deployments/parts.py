"""Optional parts of the application: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import; `python -m tests.without NAME`
takes a part out.

- `add_commands(app, open_engine)`: commands of `wingbeat`, see `cli.main`.
- `add_routes(app, models, drafter)`: routes of the HTTP application, see `api.routes`.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

PARTS = ("doctor", "page")
"""Their folders, in the order in which they add."""


def hooks(name: str) -> Iterator[Callable[..., None]]:
    """The functions of that name in the parts that are there."""
    for part in PARTS:
        folder = f"{__package__}.{part}"
        if find_spec(folder) is not None and hasattr(module := import_module(f"{folder}.part"), name):
            yield getattr(module, name)
