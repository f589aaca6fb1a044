"""JSON as RFC 8259 and the document have it, read without a reader's own leniency."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

LONE = re.compile("[\ud800-\udfff]")
LONG_DIGITS = 4000
"""Python reads no longer integers."""


class InvalidJson(ValueError):
    """The bytes are no body that the document allows."""


class Huge:
    """A number that no double and no usual integer holds."""


@dataclass
class Reading:
    """A body's value, and what the document leaves open about it."""

    value: Any = None
    doubts: set[str] = field(default_factory=set)
    """Why `invalid_json` would be right too."""


def read_json(body: bytes, max_depth: int) -> Reading:
    """The value of a body.

    Raises:
        InvalidJson: no JSON in UTF-8, too deep, a key twice, a NaN.
    """
    reading = Reading()
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson("not UTF-8") from error
    if text.startswith("\ufeff"):
        # RFC 8259: a reader may ignore a mark, or refuse it.
        reading.doubts.add("byte order mark")
        text = text[1:]
    depth = _depth(text)
    if depth > max_depth + 1:
        raise InvalidJson(f"{depth} deep")
    if depth == max_depth + 1:
        reading.doubts.add("whether the outermost object counts")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise InvalidJson("a key twice")
        return dict(items)

    def constant(name: str) -> Any:
        raise InvalidJson(name)

    def number(digits: str) -> Any:
        is_float = bool(set(digits) & set(".eE"))
        if len(digits) > LONG_DIGITS and not is_float:
            reading.doubts.add("a number without end")
            return Huge()
        value = float(digits) if is_float else int(digits)
        if value in (float("inf"), float("-inf")):
            reading.doubts.add("a number that overflows")
            return Huge()
        return value

    try:
        reading.value = json.loads(
            text, object_pairs_hook=pairs, parse_constant=constant, parse_int=number, parse_float=number
        )
    except json.JSONDecodeError as error:
        raise InvalidJson(str(error)) from error
    if any(map(LONE.search, _strings(reading.value))):
        reading.doubts.add("a lone surrogate, which UTF-8 cannot hold")
    return reading


def _depth(text: str) -> int:
    depth = deepest = 0
    for mark in re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, re.DOTALL):
        depth += (mark in "[{") - (mark in "]}")
        deepest = max(deepest, depth)
    return deepest


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _strings(item))]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []
