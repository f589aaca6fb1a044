"""Arguments that a format writes as bare text, as JSON of the type that the function's schema gives them."""

import json
from collections.abc import Sequence
from typing import Any

from wingbeat.deployments.parsing.call_format import Function

_MOST_REFERENCES = 8
_NAMES = {"True": "true", "False": "false", "None": "null"}
"""As Python writes what JSON writes otherwise."""


class ArgumentTypes:
    """The JSON types of the arguments of known functions."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._schemas = {function.name: function.schema for function in functions}

    def knows(self, name: str) -> bool:
        """Whether there is such a function; where none is known, every name may be one."""
        return not self._schemas or name in self._schemas

    def of(self, name: str, argument: str) -> frozenset[str]:
        """The types that an argument may have; empty where nothing says."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return _types(properties.get(argument), schema) if isinstance(properties, dict) else frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """A value's text as JSON of one of the types; text that is of none of the others is a string."""
    bare = text.strip()
    bare = _NAMES.get(bare, bare)
    if types != {"string"}:
        try:
            kind = _kind(json.loads(bare, parse_constant=_refuse))
        except (ValueError, RecursionError):
            kind = "string"
        # A text in quotes is a string with quotes.
        if kind != "string" and (not types or kind in types or (kind == "integer" and "number" in types)):
            return bare
    return quoted(text)


def quoted(text: str) -> str:
    """A string in JSON."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: dict[str, Any], num_references: int = 0) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str) and num_references < _MOST_REFERENCES:
        return _types(_referred(reference, root), root, num_references + 1)
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {one for one in given or () if isinstance(one, str)}
    if isinstance(schema.get("enum"), list):
        types = types or {_kind(value) for value in schema["enum"]}
    for word in ("anyOf", "oneOf"):
        for branch in schema[word] if isinstance(schema.get(word), list) else ():
            types |= _types(branch, root, num_references + 1) if num_references < _MOST_REFERENCES else set()
    return frozenset(types)


def _referred(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root if reference.startswith("#/") else None
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
