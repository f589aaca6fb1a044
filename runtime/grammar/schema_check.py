"""Prepares JSON schemas for llguidance. Each keyword is either enforced, or an error names the keyword and its path in
the schema.
"""

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from wingbeat.runtime.grammar.patterns import rust_pattern
from wingbeat.runtime.grammar.schema_choices import resolve, tells_apart, type_names

Schema = dict[str, Any]

FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
_NEVER = {
    "array": {"contains", "uniqueItems", "unevaluatedItems"},
    "object": {"propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"},
    None: {"not", "if", "$dynamicRef", "$recursiveRef"},
}
"""Keywords that llguidance does not support, by the type of the values that the keyword constrains."""
_WITHOUT_EFFECT = {"uniqueItems": False, "propertyNames": True, "unevaluatedItems": True, "unevaluatedProperties": True}
_HELPERS = {
    "then",
    "else",
    "minContains",
    "maxContains",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "x-guidance",
}
"""Keywords that have an effect only together with another unsupported keyword, whose presence raises an error; and
llguidance's own keyword.
"""
_IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_LISTED = ("prefixItems", "items", "allOf", "anyOf", "oneOf")


class NotEnforced(Exception):
    """Raised for a keyword that llguidance would ignore.

    Args:
        reason: text that follows the keyword and its path in the message.
    """

    def __init__(self, keyword: str, reason: str = "is not enforced") -> None:
        super().__init__(keyword, reason)
        self.keyword, self.reason = keyword, reason


def enforced(schema: Any, field: str) -> Any:
    """The schema, rewritten with keywords that llguidance enforces.

    Raises:
        ValueError: a keyword cannot be enforced; the message names the field, the keyword and its path.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{field} is no JSON schema: must be an object or a boolean")
    try:
        read = _rewritten(schema, schema)
        pending, seen = [(read, "#")], {}
        while pending:
            part, place = pending.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen[id(part)] = part  # `seen` holds a reference to the part, so that no other object can get the same id
            try:
                _check(part)
                pending += [
                    (below, f"{place}/{name}")
                    for name, below in _below(part)
                    if not name.startswith(("$defs", "definitions"))
                ]
                if "$ref" in part:
                    pending.append((_target(part["$ref"], read), f"{place}/$ref"))
            except NotEnforced as error:
                at = f"{error.keyword!r} at {place[:120]}"
                raise ValueError(f"{field} has the keyword {at}, which {error.reason}") from None
    except RecursionError:
        raise ValueError(f"{field} is nested too deeply") from None
    return read


def _target(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise NotEnforced("$ref", "is followed within the schema alone, from '#/' on")
    return resolve(reference, root)


def _below(part: Schema) -> Iterator[tuple[str, Any]]:
    """Schemas directly below a schema, each with its keyword and name."""
    for keyword in _NAMED:
        if isinstance(part.get(keyword), dict):
            yield from ((f"{keyword}/{name}", below) for name, below in part[keyword].items())
    for keyword in _SINGLE:
        if isinstance(part.get(keyword), dict):
            yield keyword, part[keyword]
    for keyword in _LISTED:
        if isinstance(part.get(keyword), list):
            yield from ((f"{keyword}/{index}", below) for index, below in enumerate(part[keyword]))


def _check(part: Schema) -> None:
    """Raises NotEnforced for a keyword of this schema that cannot be enforced; schemas below are not checked."""
    for keywords in _NEVER.values():
        for keyword in keywords & part.keys():
            raise NotEnforced(keyword)
    types = _types(part)
    name = part.get("format")
    if name is not None and (types is None or "string" in types) and name not in FORMATS:
        raise NotEnforced("format", f"has {str(name)[:40]!r}, which is not known: {', '.join(sorted(FORMATS))} are")
    multiple = part.get("multipleOf")
    if isinstance(multiple, float) and Fraction(multiple) != Fraction(str(multiple)):
        raise NotEnforced("multipleOf", "has no exact binary value: use a number such as 0.5 or an integer")
    least = part.get("minProperties")
    if isinstance(least, int) and least > 1 and len(set(part.get("required", ()))) < least:
        others = part.get("additionalProperties")
        if others is not False or part.get("patternProperties"):
            raise NotEnforced("minProperties", "can be enforced above 1 only if all properties are named")


def _rewritten(part: Any, root: Any) -> Any:
    """The schema, rewritten with keywords that llguidance supports."""
    if not isinstance(part, dict):
        return part
    written = {name: value for name, value in part.items() if name not in _HELPERS and _says_something(name, part)}
    for keyword in _NAMED:
        if isinstance(written.get(keyword), dict):
            written[keyword] = {name: _rewritten(below, root) for name, below in written[keyword].items()}
    for keyword in _SINGLE:
        if keyword in written:
            written[keyword] = _rewritten(written[keyword], root)
    for keyword in _LISTED:
        if isinstance(written.get(keyword), list):
            written[keyword] = [_rewritten(below, root) for below in written[keyword]]
    if isinstance(written.get("pattern"), str):
        written["pattern"] = rust_pattern(written["pattern"])
    if isinstance(written.get("patternProperties"), dict):
        patterns = written["patternProperties"]
        written["patternProperties"] = {rust_pattern(name): below for name, below in patterns.items()}
    if isinstance(part.get("oneOf"), list) and "anyOf" not in part and tells_apart(part["oneOf"], root):
        written = {"anyOf" if name == "oneOf" else name: value for name, value in written.items()}
    if not _IN_PLACE & written.keys():
        _name_the_rest(written)
    return written


def _name_the_rest(written: Schema) -> None:
    """Replaces `unevaluatedItems`, `unevaluatedProperties` and `propertyNames`, where possible, by the supported
    keywords `items`, `additionalProperties` and `patternProperties`. Changes `written` in place.
    """
    for keyword, usual in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
        if keyword in written:
            rest = written.pop(keyword)
            written.setdefault(usual, rest)
    names = written.get("propertyNames")
    if isinstance(names, dict) and not {"properties", "patternProperties", "required"} & written.keys():
        match {name: value for name, value in names.items() if name != "type"}:
            case {"pattern": str(pattern), **more} if not more:
                expression = rust_pattern(pattern)
            case {"enum": list(choices), **more} if not more and all(isinstance(one, str) for one in choices):
                expression = f"^({'|'.join(map(_quoted, choices))})$"
            case _:
                return
        del written["propertyNames"]
        written["patternProperties"] = {expression: written.get("additionalProperties", True)}
        written["additionalProperties"] = False


def _quoted(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"\\x{{{ord(found[0]):X}}}", value)


def _says_something(keyword: str, part: Schema) -> bool:
    """Whether a keyword constrains values of the types that the schema allows."""
    if keyword in _WITHOUT_EFFECT and part[keyword] in (_WITHOUT_EFFECT[keyword], {}):
        return False
    types = _types(part)
    about = next((kind for kind, keywords in _NEVER.items() if kind and keyword in keywords), None)
    return types is None or about is None or about in types


def _types(part: Schema) -> set[str] | None:
    """Types that a schema names; None if the schema names no types."""
    return type_names(part["type"]) if part.get("type") else None


def read_json(text: str, field: str) -> Any:
    """Parses JSON that a request holds as text.

    Raises:
        ValueError: the text is not valid JSON.
    """
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{field} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{field} is no JSON: {error}") from None
    return value
