"""Building blocks of commands other than `serve`, whose options are imported only when the command runs."""

import os
from collections.abc import Callable
from typing import Annotated

import typer

from wingbeat.deployments.cli.commands import Command, new_app
from wingbeat.deployments.cli.options import model_command
from wingbeat.deployments.log import LEVEL_VARIABLE, LogLevel, show_log
from wingbeat.deployments.parts import hooks
from wingbeat.kernels.parts import load_function

READS_LATER = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Click settings of a command that parses its arguments only when it runs. The modules that define its options are
therefore imported only then.
"""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show_log_from(level: LogLevel | None) -> None:
    """Shows log lines of a level and of higher levels.

    With None, only warnings and errors are shown, as Python does by default.
    """
    if level is not None:
        os.environ[LEVEL_VARIABLE] = level.value
        show_log()


def add_late_command(
    app: typer.Typer,
    name: str,
    options: str,
    run: Callable[..., None],
    arguments: tuple[str, ...] = (),
    takes_folder: bool = False,
) -> None:
    """Adds a command. The modules that define its options take seconds to import, so they are imported only when the
    command runs.

    Args:
        options: import path `module:Class` of the command's settings class.
        run: function `run(config, **own)`, see `options.model_command`; its docstring is the command's help text.
        arguments: fields of the settings that may be given as positional arguments.
        takes_folder: whether the first word of the arguments is a folder.
    """

    def command(context: typer.Context) -> None:
        for check_arguments in hooks("check_arguments"):
            check_arguments(context.args, takes_folder)
        own = new_app(run.__doc__)
        own.command(cls=Command)(model_command(load_function(options), run, arguments=arguments))
        if code := own(context.args, prog_name=context.command_path, standalone_mode=False):
            raise typer.Exit(code)

    command.__doc__ = run.__doc__
    app.command(name, context_settings=READS_LATER)(command)
