"""JSON schemas whose every keyword the grammar made of them enforces: any other is refused by keyword and place.

Written for xgrammar 0.2's reading: of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, the first one
decides alone, and what stands beside it is passed over. Annotations and unknown keywords say nothing, as the standard
has it, and so does a keyword about another type than the value's.
"""

import re
from collections.abc import Iterator
from typing import Any

from wingbeat.runtime.grammar.schema_choices import resolve, tells_apart, type_names, types_of_value

Schema = dict[str, Any]

_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"}
    | {"contains", "minContains", "maxContains"},
    "object": {"properties", "required", "patternProperties", "propertyNames", "additionalProperties", "dependencies"}
    | {"unevaluatedProperties", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"},
}
_OF_TYPE["number"] = _OF_TYPE["integer"]
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_ASSERTIONS = {"type", "not", "if", "$dynamicRef", "$recursiveRef", *_DECIDING}.union(*_OF_TYPE.values())
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
_NEVER_OF_TYPE = {
    "array": ("contains", "additionalItems"),
    "object": ("dependentRequired", "dependentSchemas", "dependencies"),
}
_TIMES = {"date", "time", "date-time", "duration"}
_NAMES = {"email", "ipv4", "ipv6", "hostname", "uuid", "json-pointer", "relative-json-pointer"}
FORMATS = {*_TIMES, *_NAMES, "uri", "uri-reference", "uri-template"}
"""Formats that are enforced, unless a pattern or a length stands beside them; others are annotations."""
_MOST_MULTIPLE, _WIDEST_RANGE = 1024, 10_000


class NotEnforced(Exception):
    """A keyword that would be passed over.

    Args:
        reason: follows the keyword and its place.
    """

    def __init__(self, keyword: str, reason: str = "is not enforced") -> None:
        super().__init__(keyword, reason)
        self.keyword, self.reason = keyword, reason


def check_schema(schema: Any, field: str) -> None:
    """Hold a schema to keywords that are enforced.

    Raises:
        ValueError: a keyword is not enforced; the message names field, keyword and place.
    """
    pending, seen = [(schema, "#")], {}
    while pending:
        part, place = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen[id(part)] = part  # kept, so that no other one has its id
        try:
            pending += [(below, f"{place}/{name}") for name, below in _check(part, schema)]
        except NotEnforced as error:
            at = f"{error.keyword!r} at {place[:120]}"
            raise ValueError(f"{field} has the keyword {at}, which {error.reason}") from None


def as_enforced(part: Any) -> Any:
    """The schema as xgrammar is to read it; names of properties and values stay as they are.

    Formats beside patterns and lengths go, since those are enforced instead, and patterns are `plain_escapes`.
    """
    if isinstance(part, list):
        return [as_enforced(item) for item in part]
    if not isinstance(part, dict):
        return part
    written = {}
    for name, value in part.items():
        if name == "format" and isinstance(value, str) and not {"pattern", "minLength", "maxLength"}.isdisjoint(part):
            continue
        if name in ("const", "enum"):
            written[name] = value
        elif name == "pattern" and isinstance(value, str):
            written[name] = plain_escapes(value)
        elif name == "patternProperties" and isinstance(value, dict):
            written[name] = {plain_escapes(pattern): as_enforced(below) for pattern, below in value.items()}
        else:
            written[name] = as_enforced(value)
    return written


def plain_escapes(expression: str) -> str:
    """A regular expression without backslashes before characters beyond ASCII, which mean themselves.

    Of such a character behind a backslash xgrammar takes the lowest byte: of a Han character, say, a quotation mark.
    """
    return re.sub(r"\\(.)", lambda escape: escape[0] if escape[1].isascii() else escape[1], expression, flags=re.DOTALL)


def _check(part: Schema, root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas below one, by name."""
    for keyword in _NEVER:
        if keyword in part:
            raise NotEnforced(keyword)
    deciding = next((keyword for keyword in _DECIDING if keyword in part), None)
    if deciding is None:
        yield from _check_types(part)
        return
    types = _declared(part)
    for keyword in part:
        if keyword in _ASSERTIONS - {deciding, "type"} and _concerns(keyword, types):
            raise NotEnforced(keyword, f"is not enforced beside {deciding!r}")
    value = part[deciding]
    if deciding == "$ref":
        yield from _check_ref(part, value, root)
    elif deciding in ("const", "enum"):
        values = [value] if deciding == "const" else value if isinstance(value, list) else []
        if types is not None and not all(types & types_of_value(one) for one in values):
            raise NotEnforced("type", f"is not enforced beside a {deciding!r} that contradicts it")
    elif isinstance(value, list):
        if not value:
            raise NotEnforced(deciding, "is empty")
        if deciding == "allOf" and len(value) > 1:
            raise NotEnforced("allOf", "is not enforced where it has several schemas")
        if types is not None and not all(_is_of(one, types, root) for one in value):
            raise NotEnforced("type", f"is not enforced beside {deciding!r}: give it in each of its schemas")
        if deciding == "oneOf" and not tells_apart(value, root):
            raise NotEnforced("oneOf", "cannot be held to one schema: use anyOf, or a const in each")
        yield from ((f"{deciding}/{index}", one) for index, one in enumerate(value))


def _check_ref(part: Schema, value: Any, root: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
        raise NotEnforced("$ref", "is followed within the schema alone, from '#/' on")
    target = resolve(value, root)
    types = _declared(part)
    if types is not None and not _is_of(target, types, root):
        raise NotEnforced("type", "is not enforced beside '$ref'")
    yield "$ref", target


def _check_types(part: Schema) -> Iterator[tuple[str, Any]]:
    types = _declared(part)
    if types is None:
        # Without a type some keywords imply one, and the others are passed over.
        if not {"properties", "additionalProperties", "unevaluatedProperties"}.isdisjoint(part):
            types = {"object"}
        elif not {"items", "prefixItems", "unevaluatedItems"}.isdisjoint(part):
            types = {"array"}
        else:
            for keyword in part:
                if keyword in _ASSERTIONS and not (keyword == "format" and part[keyword] not in FORMATS):
                    raise NotEnforced(keyword, "is not enforced without a 'type'")
            return
    for type_name, check in (
        ("string", _check_string),
        ("integer", _check_integer),
        ("number", _check_number),
        ("array", _check_array),
        ("object", _check_object),
    ):
        if type_name in types:
            for keyword in _NEVER_OF_TYPE.get(type_name, ()):
                if keyword in part:
                    raise NotEnforced(keyword)
            yield from check(part)


def _check_string(part: Schema) -> Iterator[tuple[str, Any]]:
    if "pattern" in part:
        for keyword in ("minLength", "maxLength"):
            # Every string is as long as 0.
            if keyword in part and (keyword, part[keyword]) != ("minLength", 0):
                raise NotEnforced(keyword, "is not enforced beside 'pattern'")
    yield from ()


def _check_integer(part: Schema) -> Iterator[tuple[str, Any]]:
    multiple = part.get("multipleOf")
    if multiple is not None:
        if not isinstance(multiple, int | float) or multiple != int(multiple) or not 0 < multiple <= _MOST_MULTIPLE:
            raise NotEnforced("multipleOf", f"is enforced for integers from 1 to {_MOST_MULTIPLE}")
        low, high = (
            [part[name] for name in names if name in part]
            for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        )
        if low or high:
            numbers = all(isinstance(bound, int | float) for bound in (*low, *high))
            if not (low and high and numbers and min(high) - max(low) < _WIDEST_RANGE):
                raise NotEnforced("multipleOf", f"is enforced without bounds, or within {_WIDEST_RANGE} of two of them")
    yield from ()


def _check_number(part: Schema) -> Iterator[tuple[str, Any]]:
    if "multipleOf" in part:
        raise NotEnforced("multipleOf", "is enforced for integers alone")
    yield from ()


def _check_array(part: Schema) -> Iterator[tuple[str, Any]]:
    if part.get("uniqueItems"):
        raise NotEnforced("uniqueItems")
    for keyword in ("items", "unevaluatedItems"):
        if keyword in part:
            yield keyword, part[keyword]
    items = part.get("prefixItems")
    yield from ((f"prefixItems/{index}", one) for index, one in enumerate(items if isinstance(items, list) else ()))


def _check_object(part: Schema) -> Iterator[tuple[str, Any]]:
    properties, patterns = (
        part[name] if isinstance(part.get(name), dict) else {} for name in ("properties", "patternProperties")
    )
    required = part.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in properties:
            raise NotEnforced("required", f"is not enforced of {str(name)[:40]!r}, which is not among 'properties'")
    others = part.get("additionalProperties", part.get("unevaluatedProperties", not patterns and None))
    least = part.get("minProperties")
    is_open = bool(patterns) or "propertyNames" in part or others not in (None, False)
    if isinstance(least, int) and least > 1 and is_open:
        raise NotEnforced("minProperties", "is enforced above 1 where all properties are named")
    if len(patterns) > 1:
        raise NotEnforced("patternProperties", "is enforced for one pattern")
    if patterns:
        if "propertyNames" in part:
            raise NotEnforced("propertyNames", "is not enforced beside 'patternProperties'")
        if properties and others not in (None, False):
            raise NotEnforced("patternProperties", "is not enforced beside 'properties' where others are allowed")
        if any(_matches(pattern, name) for pattern in patterns for name in properties):
            raise NotEnforced("patternProperties", "is not enforced of what is among 'properties'")
    if "propertyNames" in part:
        if not properties and (others is False or isinstance(others, dict)):
            raise NotEnforced("propertyNames", "is not enforced beside 'additionalProperties' alone")
        names = part["propertyNames"]
        if isinstance(names, dict):
            yield "propertyNames", {"type": "string", **names}
    for group, schemas in (("properties", properties), ("patternProperties", patterns)):
        yield from ((f"{group}/{name}", below) for name, below in schemas.items())
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        if keyword in part:
            yield keyword, part[keyword]


def _declared(part: Schema) -> set[str] | None:
    """The types that a schema names; None where it names none."""
    return type_names(part["type"]) if part.get("type") else None


def _concerns(keyword: str, types: set[str] | None) -> bool:
    """Whether a keyword says something of values of these types."""
    of = [name for name, keywords in _OF_TYPE.items() if keyword in keywords]
    return not of or types is None or bool(types.intersection(of))


def _is_of(part: Any, types: set[str], root: Any) -> bool:
    """Whether a schema allows none but these types."""
    if isinstance(part, dict) and "$ref" in part:
        part = resolve(part["$ref"], root)
    if not isinstance(part, dict):
        return False
    if "const" in part or "enum" in part:
        values = [part["const"]] if "const" in part else part["enum"]
        return isinstance(values, list) and all(types & types_of_value(one) for one in values)
    declared = _declared(part)
    return declared is not None and declared <= (types | {"integer"} if "number" in types else types)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True
