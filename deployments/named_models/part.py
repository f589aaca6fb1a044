"""Registers `wingbeat fetch`.

Typer is not imported here, because every process that reads settings imports this file.
"""

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add the command, and make every command log the files that it downloads."""
    import typer

    from wingbeat.deployments.log import show_lines
    from wingbeat.runtime.named_models.table import MODELS

    show_lines("wingbeat.runtime.named_models.fetch")

    @app.command("fetch")
    def fetch(name: Annotated[str, typer.Argument(help=f"One of: {', '.join(MODELS)}.", show_default=False)]) -> None:
        """Download a published model by its short name, unless it is already here, and print the path of its file."""
        from wingbeat.deployments.cli.options import UserError
        from wingbeat.runtime.named_models.fetch import FetchError, fetched

        if name not in MODELS:
            raise UserError(f"no model has the name {name!r}: it must be one of {', '.join(MODELS)}")
        try:
            print(fetched(MODELS[name]))
        except FetchError as error:
            raise UserError(str(error)) from error
