"""What every request body is: an object of known fields, each of the type it says."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from wingbeat.deployments.api.bodies.json_body import read_object
from wingbeat.deployments.api.bodies.unserved_fields import IsOff
from wingbeat.deployments.api.errors import ApiError, shown, unknown_parameter, unsupported


class RequestBody(BaseModel):
    """A body of which every field is honoured, or cannot change the result, or is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, IsOff]] = {}
    """Fields that are not served, with the values under which they ask for nothing."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and check a request body.

        Raises:
            ApiError: 400 naming the field, for anything that is malformed, unknown or not served.
        """
        return cls.of_fields(read_object(body))

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Check fields that were read already; raises as `parse`."""
        cls.check_unserved(fields)
        try:
            return cls.model_validate({name: fields[name] for name in fields if name not in cls.unserved})
        except ValidationError as error:
            raise invalid_field(error) from error

    @classmethod
    def check_unserved(cls, fields: dict[str, Any]) -> None:
        """Raises ApiError for the first field that asks for something that is not served."""
        for name, is_off in cls.unserved.items():
            if name in fields and not is_off(fields[name]):
                raise unsupported(name)


def invalid_field(error: ValidationError) -> ApiError:
    """400 for the first problem pydantic found, in OpenAI's words where it has some."""
    first = error.errors(include_url=False)[0]
    param = shown(_field_path(first["loc"]))
    match first["type"]:
        case "missing":
            return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            return unknown_parameter(param)
    problem = first["msg"][:1].lower() + first["msg"][1:]
    kind = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid '{param}': {problem}.", param=param, code=kind)


def _field_path(location: tuple[str | int, ...]) -> str:
    """`messages.0.content` for a location inside the body, as OpenAI writes it: `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
