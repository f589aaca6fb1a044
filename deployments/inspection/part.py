"""Registers `wingbeat inspect`. Typer is not imported here, because every process that reads settings imports this
file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.inspection.options import InspectConfig


def add_commands(app: "typer.Typer") -> None:
    """Add the command, which parses its arguments when it runs."""
    import typer

    from wingbeat.deployments.cli.late_commands import JsonOption, add_late_command

    def inspect(
        config: "InspectConfig",
        folder: Annotated[
            Path, typer.Argument(help="Folder of a draft head or a model, or an engine directory.", show_default=False)
        ],
        as_json: JsonOption = False,
        advise: Annotated[
            bool, typer.Option("--advise", help="Show which drafters exist for the model, and what a head would gain.")
        ] = False,
    ) -> None:
        """Show what a checkpoint holds, and how it drafts for a verifier."""
        from wingbeat.deployments.inspection.command import advise_command, inspect_command
        from wingbeat.deployments.local.engine import open_engine

        if advise:
            return advise_command(config, folder, as_json)
        inspect_command(config, folder, as_json, open_engine)

    options = "wingbeat.deployments.inspection.options:InspectConfig"
    add_late_command(app, "inspect", options, inspect, takes_folder=True)
