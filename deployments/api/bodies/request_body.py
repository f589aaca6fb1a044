"""What every request body is: JSON, read strictly and bounded before anything is built; fields, each of its type."""

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import pydantic_core
from pydantic import ConfigDict, ValidationError

from wingbeat.deployments.api.bodies.unserved_fields import Part, Unserved, check_unserved, drop_unknown
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


Kind = TypeVar("Kind", bound=Part)


class RequestBody(Part):
    """A body of which every field is honoured, or cannot change the result, or is passed over by name, or refused."""

    model_config = ConfigDict(allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    """Fields that are not served, and what becomes of them."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and check a request body.

        Raises:
            ApiError: 400 naming the field, for anything that is malformed or cannot be left out.
        """
        return cls.of_fields(read_object(body))

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Check fields that were read already; raises as `parse`."""
        check_unserved(fields, cls.unserved)
        return read_part(cls, {name: fields[name] for name in fields if name not in cls.unserved})


def read_part(kind: type[Kind], value: Any, path: str = "") -> Kind:
    """A part of a body from its JSON, without the fields that it does not have.

    Args:
        path: of the part in the request's body.

    Raises:
        ApiError: 400 naming the field that is wrong.
    """
    try:
        part = kind.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error, path) from error
    drop_unknown(part, path)
    return part


def invalid_field(error: ValidationError, path: str = "") -> ApiError:
    """400 for the first problem pydantic found below `path`, in OpenAI's words where it has some."""
    first = error.errors(include_url=False)[0]
    param = shown(_field_path(first["loc"], path))
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    problem = first["msg"][:1].lower() + first["msg"][1:]
    kind = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid '{param}': {problem}.", param=param, code=kind)


def _field_path(location: tuple[str | int, ...], path: str) -> str:
    """`messages.0.content` for a location inside the body, as OpenAI writes it: `messages[0].content`."""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
