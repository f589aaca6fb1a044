"""Hooks of `wingbeat build-engine`, and of engine directories in `wingbeat inspect`; does not import torch."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.tensorrt.build_engine_options import BuildEngineConfig


def add_commands(app: "typer.Typer") -> None:
    """Add the command, which parses its arguments when it runs."""
    from wingbeat.deployments.cli.late_commands import add_late_command

    def build_engine(config: "BuildEngineConfig") -> None:
        """Make an engine directory of a model and its drafter, for --engine-dir: ONNX files and TensorRT engines."""
        from wingbeat.deployments.tensorrt.build_engine_command import build_engine_command

        build_engine_command(config)

    options = "wingbeat.deployments.tensorrt.build_engine_options:BuildEngineConfig"
    add_late_command(app, "build-engine", options, build_engine)


def inspects(folder: Path, as_json: bool) -> bool | None:
    """If the folder is an engine directory, print its content and return True; otherwise return None."""
    from wingbeat.deployments.tensorrt.engine_findings import is_engine_directory, show_engines

    if not is_engine_directory(folder):
        return None
    show_engines(folder, as_json)
    return True
