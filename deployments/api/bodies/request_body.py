"""Base class of request bodies: checks the size of the JSON before it is parsed, then validates each field strictly."""

import json
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_args

import pydantic_core
from pydantic import ConfigDict, ValidationError

from wingbeat.deployments.api.bodies.unserved_fields import Part, Unserved, check_unserved, drop_unknown
from wingbeat.deployments.api.errors import ApiError, shown

MAX_DEPTH = 64
"""Maximum levels of nested objects and lists."""
MAX_STRINGS = 2**17
"""Maximum number of strings, including keys. The parser cannot be interrupted, so this limit, `MAX_CONTAINERS` and
`MAX_VALUES` keep its duration short.
"""
MAX_CONTAINERS = 2**15
"""Maximum number of objects and lists together."""
MAX_VALUES = 2**20
"""Maximum values of any kind, keys not counted."""

_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEP.keys())


class JsonShape(NamedTuple):
    """Numbers of strings, containers and values in a JSON text, counted without parsing. For a text that is not valid
    JSON the counts are meaningless.
    """

    num_strings: int
    num_containers: int
    num_values: int
    """Upper bound of the number of values, keys not counted."""
    num_keys: int
    depth: int

    @classmethod
    def of(cls, text: bytes) -> "JsonShape":
        """Counts a JSON text; if there are more than `MAX_STRINGS` strings, all counts except `num_strings` are 0."""
        # Backslashes occur only inside strings, where each escapes the next character. Once escaped backslashes and
        # escaped quotes are removed, each remaining quote begins or ends a string.
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
        ApiError: 400 `invalid_json`: the body is not a JSON object, repeats a key, is nested too deeply or has too many
            values.
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
        # At this point the body has nested objects or a repeated key. The fast parser silently keeps only the last
        # value of a repeated key, so the body is parsed once more to find out whether there is such a key.
        json.loads(body, object_pairs_hook=_refuse_twice)
    return fields


def invalid_json(problem: str) -> ApiError:
    """Returns a 400 for invalid JSON or JSON beyond a limit; `problem` completes "The request body ..."."""
    return ApiError(f"The request body {problem}.", code="invalid_json")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise invalid_json(f"has the key {shown(key)!r} twice in one object")
        seen.add(key)


Kind = TypeVar("Kind", bound=Part)


class RequestBody(Part):
    """Request body.

    Each field that a client sends is either used, or accepted because it cannot change the result, or named as ignored,
    or refused.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    """Handling of each unsupported field, by name."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses and validates a request body.

        Raises:
            ApiError: 400, names the field that is malformed or refused.
        """
        return cls.of_fields(read_object(body))

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Makes the body from parsed fields; raises the errors of `parse`."""
        check_unserved(fields, cls.unserved)
        served = {name: value for name, value in fields.items() if name not in cls.unserved}
        for name in _integers(cls) & served.keys():
            # JSON does not tell 16.0 from 16, and some languages write every number with a fraction.
            if isinstance(served[name], float) and served[name].is_integer():
                served[name] = int(served[name])
        return read_part(cls, served)


@cache
def _integers(kind: type[Part]) -> frozenset[str]:
    """Returns the names of the fields that are integers."""
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if int in (field.annotation, *get_args(field.annotation)))


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
    if first["type"] in ("dict_type", "model_type"):
        problem = "input should be an object"
    kind = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid '{param}': {problem}.", param=param, code=kind)


def _field_path(location: tuple[str | int, ...], path: str) -> str:
    """Formats a location inside the body as OpenAI does: `messages[0].content`."""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
