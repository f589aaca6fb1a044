"""Generates command-line options from a pydantic model, so that each setting has exactly one definition."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from wingbeat.deployments.options.problems import first_problem, plain_type
from wingbeat.deployments.options.words import listed
from wingbeat.deployments.parts import first_result, hooks

Config = TypeVar("Config", bound=BaseModel)


class UserError(Exception):
    """Error that the user can correct; the message is one line that states what to change."""


def model_command(
    config_class: type[Config], run: Callable[..., None], arguments: Sequence[str] = ()
) -> Callable[..., None]:
    """Makes a command that calls `run(config, **own)` and has one option for each field of `config_class`.

    The other parameters of `run`, which have typer annotations, become further options and are passed as `own`.

    Args:
        arguments: fields that may also be given as positional arguments, in this order.
    """
    own = list(inspect.signature(run).parameters.values())[1:]

    def command(**values: Any) -> None:
        own_values = {parameter.name: values.pop(parameter.name) for parameter in own}
        for name in arguments:
            _take_argument(name, values)
        run(build_config(config_class, values), **own_values)

    parameters = [_argument(name) for name in arguments]
    panel = first_result("option_panel", config_class) or (lambda name: None)
    options = [_parameter(name, config_class.model_fields[name], panel(name)) for name in config_class.model_fields]
    # Typer reads options from this signature. Parameters are keyword-only, so that parameters without a default may
    # follow parameters with a default.
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    listed_options = [*options, *own]
    for place in hooks("option_place"):
        listed_options.sort(key=place)
    command.__signature__ = inspect.Signature([*parameters, *listed_options])
    command.__doc__ = run.__doc__
    return command


def build_config(config_class: type[Config], values: dict[str, Any]) -> Config:
    """Builds the settings from option values; the value None means that the option was not given.

    Raises:
        UserError: an option is missing or invalid; the error names the first such option.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if get_origin(plain_type(config_class.model_fields[name].annotation)) in (tuple, list):
            given[name] = listed(value)
    try:
        return config_class(**given)
    except ValidationError as error:
        raise UserError(first_problem(error, config_class, option_name)) from error


def option_name(field_name: str) -> str:
    """Returns the name of a field's option: `--hidden-size` for `hidden_size`."""
    return "--" + field_name.replace("_", "-")


def _argument(name: str) -> inspect.Parameter:
    argument = typer.Argument(metavar=name.upper(), help=f"Same as {option_name(name)}.", show_default=False)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(f"{name}_argument", kind, default=None, annotation=Annotated[str | None, argument])


def _take_argument(name: str, values: dict[str, Any]) -> None:
    """Moves a positional argument to the field of its option.

    Raises:
        UserError: both the positional argument and the option are given.
    """
    given = values.pop(f"{name}_argument")
    if given is None:
        return
    if values[name] is not None:
        raise UserError(
            f"{option_name(name)} {values[name]}: the {name} is given twice, also as {given}; leave one out"
        )
    values[name] = given


def _parameter(name: str, field: FieldInfo, panel: str | None) -> inspect.Parameter:
    kind = plain_type(field.annotation)
    flag = option_name(name)
    description = f"{field.description or ''} {_default_text(field)}".strip()
    if kind is bool:
        flags = f"{flag}/--no-{flag.removeprefix('--')}"
        annotation = Annotated[
            bool | None, typer.Option(flags, help=description, show_default=False, rich_help_panel=panel)
        ]
    else:
        words = list(map(str, get_args(kind))) if get_origin(kind) is Literal else []
        repeatable = (field.json_schema_extra or {}).get("repeatable", False)
        complete = (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None
        option = typer.Option(
            flag,
            help=description,
            metavar="TEXT" if repeatable else _metavar(kind),
            show_default=False,
            autocompletion=complete,
            rich_help_panel=panel,
        )
        annotation = Annotated[(list[str] if repeatable else str) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list):
        return "A,B,..."
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "JSON"
    return {int: "INT", float: "NUMBER", str: "TEXT"}.get(kind, "PATH")


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "[required]"
    default = field.get_default(call_default_factory=False)
    if default is None or default is PydanticUndefined or default in ("", ()):
        return ""
    if isinstance(default, tuple | list):
        default = ",".join(map(str, default))
    return f"[default: {default}]"
