"""What every request body is: an object of fields, each of the type it says."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, ValidationError

from wingbeat.deployments.api.bodies.ignored_fields import Part, drop_unknown
from wingbeat.deployments.api.bodies.json_body import read_object
from wingbeat.deployments.api.bodies.unserved_fields import Unserved, check_unserved
from wingbeat.deployments.api.errors import ApiError, shown

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
