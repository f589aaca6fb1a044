"""Registers `wingbeat train`; does not import torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add the command. When it runs, it first checks that the named folders exist, and then parses its arguments."""
    import typer

    from wingbeat.deployments.cli.late_commands import READS_LATER
    from wingbeat.deployments.parts import hooks

    def train(context: typer.Context) -> None:
        """Train a drafter for a verifier."""
        for check_arguments in hooks("check_arguments"):
            check_arguments(context.args)
        from wingbeat.deployments.training.train_command import train_app

        train_app()(context.args or ["--help"], prog_name="wingbeat train", standalone_mode=False)

    app.command("train", context_settings=READS_LATER)(train)
