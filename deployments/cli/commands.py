"""Pieces that the commands of `wingbeat` are made of; loads no torch."""

import os
from collections.abc import Callable
from typing import Annotated

import typer

from wingbeat.deployments.cli.options import Config, model_command
from wingbeat.deployments.cli.panels import GroupedCommand
from wingbeat.deployments.log import LEVEL_VARIABLE, LogLevel, show_log

READS_LATER = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that reads its own arguments once it runs, so that what they need is imported then."""

Level = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level",
        metavar="|".join(LogLevel),
        show_default=False,
        help="Least level of Wingbeat's own log lines.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def new_app(help_text: str | None, add_completion: bool = False) -> typer.Typer:
    """A group of commands, or one that stands alone."""
    return typer.Typer(
        help=help_text,
        add_completion=add_completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


def show_log_from(level: LogLevel | None) -> None:
    """Show log lines from a level up; without a level, warnings alone, as Python does."""
    if level is not None:
        os.environ[LEVEL_VARIABLE] = level.value
        show_log()


def run_now(
    context: typer.Context, config_class: type[Config], run: Callable[..., None], arguments: tuple[str, ...] = ()
) -> None:
    """Read the arguments that were left for later, and run.

    Args:
        arguments: fields that are given by their place.

    Raises:
        typer.Exit: with the command's exit code, where that is not 0.
    """
    own = new_app(run.__doc__)
    own.command(cls=GroupedCommand)(model_command(config_class, run, arguments=arguments))
    if code := own(context.args, prog_name=context.command_path, standalone_mode=False):
        raise typer.Exit(code)
