"""The `wingbeat` command. Errors in its usage are printed as one line on stderr, with exit code 2."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.commands import Command, Level, new_app
from wingbeat.deployments.cli.options import UserError, model_command, option_name
from wingbeat.deployments.log import LEVEL_VARIABLE, show_lines
from wingbeat.deployments.options.panel_titles import CLUSTER
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.deployments.start_up import new_start_up

USAGE_ERROR = 2

# Depending on its version, typer contains its own copy of click or uses the installed click.
ClickException = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(args: list[str] | None = None) -> None:
    """Runs the command and always raises SystemExit.

    `args` are the words of the command line; with None, those of this process are read.
    """
    args = sys.argv[1:] if args is None else args
    show_lines("wingbeat.runtime.hub")
    try:
        if args[:1] == ["serve"]:
            args = ["serve", *_words_of_serve(args[1:])]
        code = _app()(args or ["--help"], prog_name="wingbeat", standalone_mode=False)
    except UserError as error:
        code = _complain(str(error))
    except ClickException as error:
        code = _complain(_hint(error) or error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code or 0)


def _words_of_serve(args: list[str]) -> list[str]:
    """Returns the arguments after `serve`, in which the hooks of optional parts have replaced another server's options
    by Wingbeat's settings. Prints to stderr one line for each argument that is ignored.
    """
    for read in hooks("words_of_serve"):
        args, notes = read(args, AppConfig)
        for note in notes:
            print(f"wingbeat: {note}", file=sys.stderr)
    return args


def _hint(error: ClickException) -> str | None:
    """Returns advice on an unknown option of a command that has a model; None if no part knows the option."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    own = {parameter.name for parameter in context.command.params} if context is not None else set()
    said = first_result("hint", option, own, option_name) if option and "model" in own else None
    return said and f"{option}: {said}"


def _complain(message: str) -> int:
    print("wingbeat: " + " ".join(message.split()), file=sys.stderr)
    return USAGE_ERROR


def _app() -> typer.Typer:
    app = new_app("EAGLE speculative decoding as a Ray Serve application.", add_completion=True)

    @app.callback()
    def top(
        version: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """EAGLE speculative decoding as a Ray Serve application."""

    app.command("serve", cls=Command)(model_command(AppConfig, _serve, arguments=("model", "drafter")))
    for add_commands in hooks("add_commands"):
        add_commands(app)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"wingbeat {version('wingbeat')}")
        raise typer.Exit


def _serve(
    config: AppConfig,
    host: Annotated[str, typer.Option(help="Address of this machine to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            rich_help_panel=CLUSTER,
            help="Address of a running Ray cluster to serve in, of which this machine is a node; 'auto' finds the "
            "cluster started on this machine. The application ends with this command unless --detach is given.",
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            rich_help_panel=CLUSTER,
            help="With a running cluster: return as soon as the application serves, and leave it running.",
        ),
    ] = False,
    log_level: Level = None,
) -> None:
    """Serve the OpenAI API with Ray until SIGTERM or Ctrl-C, after which running requests are completed."""
    if log_level is not None:
        os.environ[LEVEL_VARIABLE] = log_level.value  # the processes that Ray starts inherit it
    start_up = new_start_up()
    try:
        start_up.event("checking the settings and the files")
        # In a cluster that is joined, GPU shares are chosen only after joining it, from the number of GPUs that Ray
        # reports.
        here = address is None and not _joins_cluster()
        for take_gpus in hooks("take_gpus") if here else ():
            config = take_gpus(config, False, start_up.event)
        for check in hooks("check_start"):
            check(config, host, port, address, here)
        start_up.event("starting Ray" if address is None else f"joining the Ray cluster at {address}")
        # Ray is imported here, because the import takes seconds and nothing before this line needs Ray.
        from wingbeat.deployments.launch import StartError, serve_until_stopped

        try:
            serve_until_stopped(config, host, port, start_up, address, detach)
        except StartError as error:
            raise UserError(str(error)) from error
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    finally:
        start_up.close()


def _joins_cluster() -> bool:
    """Returns whether Ray will join a running cluster, according to the environment variable and the file that Ray
    itself reads.
    """
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    return bool(os.environ.get("RAY_ADDRESS")) or (folder / "ray_current_cluster").exists()
