"""Registers `wingbeat bench`.

Typer is not imported here, because this file is imported by every process that reads settings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add the command."""
    from wingbeat.deployments.bench.command import bench_command
    from wingbeat.deployments.bench.options import BenchConfig
    from wingbeat.deployments.cli.commands import Command, Level
    from wingbeat.deployments.cli.late_commands import JsonOption, show_log_from
    from wingbeat.deployments.cli.options import model_command

    def bench(config: BenchConfig, as_json: JsonOption = False, log_level: Level = None) -> None:
        """Compare speculative with plain decoding in this process, or several drafters in processes of their own."""
        from wingbeat.deployments.local.engine import open_engine

        show_log_from(log_level)
        bench_command(config, as_json, open_engine)

    app.command("bench", cls=Command)(model_command(BenchConfig, bench, arguments=("model",)))
