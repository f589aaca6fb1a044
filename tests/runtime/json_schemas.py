"""Random JSON schemas of the kinds that programs use."""

import random
from typing import Any

_WORDS = ("name", "size", "items", "kind", "left", "right", "path", "count", "flag", "note")


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object whose properties are all required, bounded in size so that most answers end."""
    names = chance.sample(_WORDS, chance.randint(1, 3))
    properties = {name: _value(chance, depth) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    simple = [
        lambda: {"type": "integer", "minimum": 0, "maximum": chance.choice((9, 99, 12345))},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "string", "maxLength": chance.randint(1, 12)},
        lambda: {"type": "string", "pattern": chance.choice(("^[a-z]{2,5}$", "^[0-9]{4}-[0-9]{2}$"))},
        lambda: {"enum": chance.sample(_WORDS, 3)},
        lambda: {"const": chance.choice(_WORDS)},
        lambda: {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    ]
    nested = [
        lambda: random_schema(chance, depth - 1),
        lambda: {"type": "array", "items": _value(chance, depth - 1), "minItems": 1, "maxItems": chance.randint(1, 3)},
    ]
    return chance.choice(simple if depth == 0 else simple + nested)()
