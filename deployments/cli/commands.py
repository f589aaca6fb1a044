"""Building blocks of the commands of `wingbeat`. This module does not import torch."""

from typing import Annotated

import typer
from typer.core import TyperCommand

from wingbeat.deployments.log import LogLevel
from wingbeat.deployments.parts import hooks

Command: type[TyperCommand] = next(iter(hooks("command_class")), TyperCommand)
"""Class of commands whose options come from settings."""

Level = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level",
        metavar="|".join(LogLevel),
        show_default=False,
        help="Lowest level of Wingbeat's log lines to show.",
    ),
]


def new_app(help_text: str | None, add_completion: bool = False) -> typer.Typer:
    """Makes a typer application: a group of commands, or a single command."""
    return typer.Typer(
        help=help_text,
        add_completion=add_completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
