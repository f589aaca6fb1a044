"""Fields of JSON files taken away, or replaced by what nobody should write there."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GONE = "gone"
VALUES: dict[str, Any] = {
    GONE: None,
    "null": None,
    "0": 0,
    "-1": -1,
    "2^31": 2**31,
    "10^9": 10**9,
    "1e30": 1e30,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "-2.5": -2.5,
    "0.5": 0.5,
    "no text": "",
    "text": "x",
    "no list": [],
    "list": [0],
    "object": {},
    "true": True,
}


class Mutation(NamedTuple):
    """A change of a file."""

    file: str
    path: tuple[str, ...]
    value: str
    """Key of `VALUES`."""

    def __str__(self) -> str:
        return f"{self.file}:{'.'.join(self.path)}={self.value}"

    def write(self, folder: Path) -> None:
        """Change the file, which `folder` has."""
        file = folder / self.file
        fields = json.loads(file.read_text())
        inner = fields
        for name in self.path[:-1]:
            inner = inner[name]
        if self.value == GONE:
            del inner[self.path[-1]]
        else:
            inner[self.path[-1]] = VALUES[self.value]
        file.write_text(json.dumps(fields))


def mutations(folder: Path, file: str) -> list[Mutation]:
    """Every field of a file, with every value."""
    fields = json.loads((folder / file).read_text())
    return [Mutation(file, path, value) for path in _paths(fields, ()) for value in VALUES]


def some(of: list[Mutation], count: int, seed: int = 0) -> list[Mutation]:
    """So many of them, drawn."""
    return random.Random(seed).sample(of, min(count, len(of)))


def _paths(fields: dict[str, Any], before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from _paths(value, (*before, name))
