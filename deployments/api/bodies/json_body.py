"""Reading a request body as JSON: strictly, and bounded before anything is built from it."""

import json
from itertools import accumulate
from typing import Any, NamedTuple

import pydantic_core

from wingbeat.deployments.api.errors import ApiError, shown

MAX_DEPTH = 64
MAX_STRINGS = 2**17
"""Keys and values. This and the next two bound how long the parser, which cannot be interrupted, holds the process."""
MAX_CONTAINERS = 2**15
"""Objects and lists."""
MAX_VALUES = 2**20

_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEP.keys())


class JsonShape(NamedTuple):
    """What a JSON text holds, counted without parsing it; of a text that is not JSON the counts mean nothing."""

    num_strings: int
    num_containers: int
    num_values: int
    """At most so many, keys not counted."""
    num_keys: int
    depth: int

    @classmethod
    def of(cls, text: bytes) -> "JsonShape":
        """Count; the rest is 0 where there are too many strings to look at."""
        # Backslashes stand only in strings, where they come in pairs or before what they escape.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        num_strings = (text.count(b'"') + 1) // 2
        if num_strings > MAX_STRINGS:
            return cls(num_strings, 0, 0, 0, 0)
        outside = b"".join(text.split(b'"')[::2])
        brackets = outside.translate(None, _NO_BRACKETS)
        num_containers = brackets.count(b"[") + brackets.count(b"{")
        num_values = outside.count(b",") + num_containers + 1
        depth = 0
        if num_containers <= MAX_CONTAINERS:
            depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
        return cls(num_strings, num_containers, num_values, outside.count(b":"), depth)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        ApiError: 400 `invalid_json`: it is none, holds a key twice, is nested too deep or has too many values.
    """
    shape = JsonShape.of(body)
    for count, limit, noun in (
        (shape.num_strings, MAX_STRINGS, "strings"),
        (shape.num_containers, MAX_CONTAINERS, "objects and lists"),
        (shape.num_values, MAX_VALUES, "values"),
        (shape.depth, MAX_DEPTH, "levels"),
    ):
        if count > limit:
            raise invalid_json(f"has more than {limit} {noun}")
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid_json(f"is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid_json("must be a JSON object")
    if shape.num_keys != len(fields):
        # There are objects within it, or a key twice: the fast parser keeps the last one and says nothing.
        json.loads(body, object_pairs_hook=_refuse_twice)
    return fields


def invalid_json(problem: str) -> ApiError:
    """400 for a body that is not what an endpoint reads."""
    return ApiError(f"The request body {problem}.", code="invalid_json")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise invalid_json(f"has the key {shown(key)!r} twice in one object")
        seen.add(key)
