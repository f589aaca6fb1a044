"""Converts pydantic's validation errors to one line for the person who wrote the settings."""

from collections.abc import Callable
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import click
from pydantic import BaseModel, SecretStr, ValidationError

from wingbeat.deployments.parts import first_result


class SettingsError(click.ClickException, ValueError):
    """Settings are invalid; the message is one line. Ray's command `serve` prints the line without a traceback."""


def plain_type(annotation: Any) -> Any:
    """Returns the type without its `| None`."""
    if get_origin(annotation) in (Union, UnionType):
        return next(kind for kind in get_args(annotation) if kind is not NoneType)
    return annotation


def first_problem(error: ValidationError, config_class: type[BaseModel], write: Callable[[str], str] = str) -> str:
    """Describes the first error in one line: the setting's name, its value (unless it is secret), and the allowed
    values.

    Args:
        write: returns a setting's name in the form that the user wrote, such as a command line option.
    """
    first = error.errors(include_url=False)[0]
    problem = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return problem
    name = str(first["loc"][0])
    # For a field of a union type, pydantic appends to the location the member of the union that it tried, such as
    # `literal[...]`.
    parts = (part for part in first["loc"][1:] if isinstance(part, str) and not part.startswith("literal["))
    option = ".".join([write(name), *parts])
    if first["type"] == "missing":
        return f"{option} is required"
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return _unknown(name, config_class, write)
    field = config_class.model_fields.get(name)
    kind = None if field is None else plain_type(field.annotation)
    if SecretStr in (kind, *get_args(kind)):
        return f"{option}: {problem[:1].lower() + problem[1:]}"
    return f"{option} {first['input']}: {problem[:1].lower() + problem[1:]}"


def _unknown(name: str, config_class: type[BaseModel], write: Callable[[str], str]) -> str:
    said, close = (
        first_result("hint", name, config_class.model_fields, write),
        get_close_matches(name, config_class.model_fields, 1),
    )
    if said is None and close:
        said = f"did you mean {write(close[0])}?"
    return f"there is no setting {write(name)}" + ("" if said is None else f": {said}")
