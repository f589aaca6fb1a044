"""`wingbeat build-engine`: builds an engine directory of a verifier and its EAGLE head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.tensorrt.build_engine_options import ENGINE_DTYPES, BuildEngineConfig, weights_dtype
from wingbeat.runtime.tensorrt.build import BuildPlan, build_engines, export_directory, num_steps
from wingbeat.runtime.tensorrt.builders import find_builder
from wingbeat.runtime.tensorrt.engine_directory import EngineDirectory
from wingbeat.runtime.tensorrt.export import check_exporter
from wingbeat.runtime.tensorrt.rounding import rounding_between


def build_engine_command(config: BuildEngineConfig) -> None:
    """Export a verifier and its head, and build TensorRT engines of both.

    Raises:
        UserError: a checkpoint or a setting cannot be used, or a builder is missing; the message is one line.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        # Missing packages are reported before the export, which takes minutes.
        check_exporter()
        builder = None if config.onnx_only else find_builder(config.builder)
        plan = config.plan()
        note = rounding_note(plan)
        with _progress(num_steps(plan, builder is not None)) as begin:
            directory = export_directory(plan, begin)
            if builder is not None:
                directory = build_engines(directory, builder, config.compute_capability, begin)
    except (ValueError, OSError) as error:
        raise UserError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    print(summary(directory))
    if note is not None:
        print(note)


def rounding_note(plan: BuildPlan) -> str | None:
    """Return a line about how the chosen dtype rounds the checkpoint's numbers; None if no number is rounded.

    Raises:
        ModelCheckpointError: the checkpoint cannot be loaded.
    """
    stored = weights_dtype(plan.model)
    if plan.dtype == torch.float32 or stored in ENGINE_DTYPES:
        return None
    found = rounding_between(plan.model, torch.float32, plan.dtype)
    return f"{plan.model.resolve().name} is in {stored}: in {str(plan.dtype).removeprefix('torch.')} its {found}"


@contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[str], None]]:
    """Context manager with a progress bar on stderr; yields a function to call with each step's name when the step
    begins.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, begun = progress.add_task("starting", total=num_steps), count()
        yield lambda step: progress.update(task, description=step, completed=next(begun))
        progress.update(task, description="done", completed=num_steps)


def summary(directory: EngineDirectory) -> str:
    """Return a line about an engine directory, for display."""
    base = directory.base
    engines = f"engines by {base.builder} {base.tools[base.builder]}" if base.builder else "ONNX files only"
    drafter = "no drafter" if directory.draft is None else f"drafter {directory.draft.name}"
    num_bytes = sum(file.stat().st_size for file in directory.folder.iterdir() if file.is_file())
    return f"{directory.folder}: {base.name}, {drafter}, {base.dtype}, {engines}, {num_bytes} bytes"
