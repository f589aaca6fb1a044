"""`wingbeat build-engine`, and engine directories in `wingbeat inspect`; loads no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.cli.local import OpenEngine


def add_commands(app: "typer.Typer", open_engine: "OpenEngine") -> None:
    """Add the command, which reads its own arguments once it runs."""
    import typer

    from wingbeat.deployments.cli.commands import READS_LATER, run_now
    from wingbeat.deployments.cli.named_folders import check_named_folders

    def build_engine(context: typer.Context) -> None:
        """Make an engine directory of a model and its drafter, for --engine-dir."""
        check_named_folders(context.args)
        from wingbeat.deployments.tensorrt.build_engine_options import BuildEngineConfig

        def run(config: BuildEngineConfig) -> None:
            """Export a verifier and its EAGLE head to ONNX, and build TensorRT engines of them."""
            from wingbeat.deployments.tensorrt.build_engine_command import build_engine_command

            build_engine_command(config)

        run_now(context, BuildEngineConfig, run)

    app.command("build-engine", context_settings=READS_LATER)(build_engine)


def inspects(folder: Path, as_json: bool) -> bool | None:
    """Print an engine directory; None for another folder."""
    from wingbeat.deployments.tensorrt.engine_findings import is_engine_directory, show_engines

    if not is_engine_directory(folder):
        return None
    show_engines(folder, as_json)
    return True
