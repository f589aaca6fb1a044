"""Converts arguments that a model wrote as text without types to JSON values of the types in the function's schema."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from wingbeat.deployments.parsing.call_format import Function

_MOST_STEPS = 64
"""Maximum number of references and branches that are followed in a schema, in total."""
_NAMES = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON's literals."""


class ArgumentType(NamedTuple):
    """JSON types of an argument, and the values that its schema lists; both sets are empty if the schema does not
    restrict the argument.
    """

    types: frozenset[str] = frozenset()
    """Names of JSON types."""
    choices: frozenset[str] = frozenset()
    """Strings that the schema lists as the only values; empty if there is no such list."""

    @property
    def is_free_text(self) -> bool:
        """Whether any text is a valid value without conversion."""
        return self.types == {"string"} and not self.choices


class ArgumentTypes:
    """Argument types of known functions."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._schemas = {function.name: function.schema for function in functions}
        self._found: dict[tuple[str, str], ArgumentType] = {}

    def knows(self, name: str) -> bool:
        """Returns whether a function is known; True for any name if no functions are known."""
        return not self._schemas or name in self._schemas

    def type_of(self, name: str, argument: str) -> ArgumentType:
        """Returns the type of an argument."""
        place = name, argument
        if place not in self._found:
            schema = self._schemas.get(name)
            properties = schema.get("properties") if isinstance(schema, dict) else None
            value = properties.get(argument) if isinstance(properties, dict) else None
            self._found[place] = _type(value, schema or {}, iter(range(_MOST_STEPS)))
        return self._found[place]


def as_json(text: str, kind: ArgumentType) -> str:
    """Converts a value's text to JSON of an allowed type; a text that fits no allowed type becomes a string."""
    types, choices = kind
    bare = text.strip()
    if bare in choices:
        return quoted(bare)
    bare = _NAMES.get(bare, bare)
    if types != {"string"}:
        try:
            found = _kind(json.loads(bare, parse_constant=_refuse))
        except (ValueError, RecursionError):
            found = "string"
        # A text in quotes becomes a string that includes the quotes.
        if found != "string" and (not types or found in types or (found == "integer" and "number" in types)):
            return bare
    return quoted(text)


def quoted(text: str) -> str:
    """Returns a string in JSON."""
    return json.dumps(text, ensure_ascii=False)


def _type(schema: Any, root: dict[str, Any], steps: Iterator[int]) -> ArgumentType:
    # A client's schema may refer to itself in each branch, so the search is limited by `steps`.
    if not isinstance(schema, dict) or next(steps, None) is None:
        return ArgumentType()
    if isinstance(schema.get("$ref"), str):
        return _type(_referred(schema["$ref"], root), root, steps)
    given = schema.get("type")
    types = (
        {given}
        if isinstance(given, str)
        else {one for one in (given if isinstance(given, list) else ()) if isinstance(one, str)}
    )
    listed = schema.get("enum") if isinstance(schema.get("enum"), list) else []
    types = types or {_kind(value) for value in listed}
    choices = {value for value in listed if isinstance(value, str)}
    for word in ("anyOf", "oneOf"):
        for branch in schema[word] if isinstance(schema.get(word), list) else ():
            more = _type(branch, root, steps)
            types, choices = types | more.types, choices | more.choices
    return ArgumentType(frozenset(types), frozenset(choices))


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
    raise ValueError(f"{word} is not JSON")
