"""Determines which values JSON schemas allow, from their types, constants and required properties."""

import json
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
_MOST_CHOICES = 64
_MOST_NAMES = 16
_MOST_REFS = 32


def resolve(reference: Any, root: Any) -> Any:
    """The part of the schema `root` to which a `$ref` points; None if there is no such part."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = root
    for escaped in filter(None, unquote(reference[1:]).split("/")):
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part


def type_names(declared: Any) -> set[str]:
    """Type names in the keyword `type`, whose value is a name or a list of names."""
    names = declared if isinstance(declared, list) else [declared]
    return {name for name in names if isinstance(name, str)}


def types_of_value(value: Any) -> set[str]:
    """Type names that match a value."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def tells_apart(choices: list[Any], root: Any) -> bool:
    """Whether no value matches two of the schemas, judged by types, constants and constants of required properties."""
    if len(choices) > _MOST_CHOICES:
        return False
    found = [_followed(choice, root) for choice in choices]
    return all(_are_disjoint(one, other, root) for one, other in combinations(found, 2))


def _followed(part: Any, root: Any) -> Schema:
    for _ in range(_MOST_REFS):
        if not isinstance(part, dict):
            return {}
        if "$ref" not in part:
            return part
        part = resolve(part["$ref"], root)
    return {}


def _are_disjoint(one: Schema, other: Schema, root: Any) -> bool:
    mine, theirs = _types(one), _types(other)
    if mine is not None and theirs is not None and not mine & theirs:
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not {_canonical(value) for value in values} & {_canonical(value) for value in others}
    return any(
        _are_disjoint(_property(one, name, root), _property(other, name, root), root)
        # A schema that requires the property allows only certain constants as its value. If the other schema allows
        # none of these constants, no value matches both schemas.
        for name in sorted(_required(one) | _required(other))[:_MOST_NAMES]
        if _values(_property(one, name, root)) is not None and _values(_property(other, name, root)) is not None
    )


def _types(part: Schema) -> set[str] | None:
    """Types that a schema allows; None means all types; "number" includes "integer"."""
    values = _values(part)
    if values is not None:
        return set().union(*map(types_of_value, values))
    if not part.get("type"):
        return None
    names = type_names(part["type"])
    return names | {"integer"} if "number" in names else names


def _values(part: Schema) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _canonical(value: Any) -> str:
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True)


def _required(part: Schema) -> set[str]:
    names = part.get("required")
    is_object = part.get("type") == "object" and isinstance(names, list)
    return {name for name in names if isinstance(name, str)} if is_object else set()


def _property(part: Schema, name: str, root: Any) -> Schema:
    properties = part.get("properties")
    return _followed(properties.get(name) if isinstance(properties, dict) else None, root)
