"""Registers `wingbeat generate`. Typer is not imported here, because every process that reads settings imports this
file.
"""

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    from wingbeat.deployments.cli.commands import Command, Level
    from wingbeat.deployments.cli.late_commands import JsonOption, show_log_from
    from wingbeat.deployments.cli.options import model_command
    from wingbeat.deployments.local.generate import GenerateConfig, generate_command

    def generate(
        config: GenerateConfig,
        prompt: Annotated[str | None, typer.Argument(help="Text to continue.", show_default=False)] = None,
        stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
        as_json: JsonOption = False,
        log_level: Level = None,
    ) -> None:
        """Continue a prompt in this process."""
        from wingbeat.deployments.local.engine import open_engine

        show_log_from(log_level)
        generate_command(config, prompt, tuple(stop or ()), as_json, open_engine)

    app.command("generate", cls=Command)(model_command(GenerateConfig, generate))
