"""Base of request bodies: JSON is bounded before it is parsed and then validated strictly field by field."""

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import pydantic_core
from pydantic import ConfigDict, ValidationError

from wingbeat.deployments.api.bodies.unserved_fields import Part, Unserved, check_unserved, drop_unknown
from wingbeat.deployments.api.errors import ApiError, shown

MAX_DEPTH = 64
"""Levels of nested objects and lists."""
MAX_STRINGS = 2**17
"""Strings, keys included. This limit and the next two bound the time of the parser, which cannot be interrupted."""
MAX_CONTAINERS = 2**15
"""Objects and lists."""
MAX_VALUES = 2**20
"""Values of any kind, keys not counted."""

_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEP.keys())


class JsonShape(NamedTuple):
    """Counts of a JSON text, made without parsing. For a text that is not valid JSON the counts are meaningless."""

    num_strings: int
    num_containers: int
    num_values: int
    """Upper bound of the number of values, keys not counted."""
    num_keys: int
    depth: int

    @classmethod
    def of(cls, text: bytes) -> "JsonShape":
        """Counts; all counts but `num_strings` are 0 if there are more than `MAX_STRINGS` strings."""
        # Backslashes occur only in strings, in pairs or before the character that they escape.
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
    """Parses the JSON object of a request body.

    Raises:
        ApiError: 400 `invalid_json`: not a JSON object, a repeated key, nested too deeply or too many values.
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
        # There are nested objects or a repeated key, of which the fast parser silently keeps the last.
        json.loads(body, object_pairs_hook=_refuse_twice)
    return fields


def invalid_json(problem: str) -> ApiError:
    """Returns a 400 for a body that is not the JSON an endpoint expects."""
    return ApiError(f"The request body {problem}.", code="invalid_json")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise invalid_json(f"has the key {shown(key)!r} twice in one object")
        seen.add(key)


Kind = TypeVar("Kind", bound=Part)


class RequestBody(Part):
    """Request body. Each of its fields is used, has no effect on the result, is named as ignored, or is refused."""

    model_config = ConfigDict(allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    """Unsupported fields by name, and how each is handled."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses and validates a request body.

        Raises:
            ApiError: 400, naming the field that is malformed or refused.
        """
        return cls.of_fields(read_object(body))

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Validates parsed fields; raises as `parse`."""
        check_unserved(fields, cls.unserved)
        return read_part(cls, {name: fields[name] for name in fields if name not in cls.unserved})


def read_part(kind: type[Kind], value: Any, path: str = "") -> Kind:
    """Validates a part of a body; unknown fields are dropped and named as ignored.

    Args:
        path: path of the part in the request's body.

    Raises:
        ApiError: 400, naming the invalid field.
    """
    try:
        part = kind.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error, path) from error
    drop_unknown(part, path)
    return part


def invalid_field(error: ValidationError, path: str = "") -> ApiError:
    """Returns a 400 for pydantic's first error below `path`, in OpenAI's wording where OpenAI has one."""
    first = error.errors(include_url=False)[0]
    param = shown(_field_path(first["loc"], path))
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    problem = first["msg"][:1].lower() + first["msg"][1:]
    kind = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid '{param}': {problem}.", param=param, code=kind)


def _field_path(location: tuple[str | int, ...], path: str) -> str:
    """Formats a location inside the body as OpenAI does: `messages[0].content`."""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
