"""`wingbeat inspect`: what a checkpoint folder holds, and how it drafts for a verifier."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from wingbeat.deployments.cli.local import LocalConfig, OpenEngine
from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.model_options import LoadOptions

if TYPE_CHECKING:
    from wingbeat.runtime.checks.inspection import Convention, Inspection
    from wingbeat.runtime.checks.readings import ConventionChoice
    from wingbeat.runtime.checks.self_test import SelfTest
    from wingbeat.runtime.heads.target import TargetDescription

_AT_ONCE = 16
"""Sequences of the self-test's engine."""


class InspectConfig(LoadOptions):
    """Options of `wingbeat inspect`, the folder apart."""

    model: Path | None = Field(
        None,
        description="Folder of the verifier to try the drafter with; a model's own, to try its prediction modules.",
    )


@dataclass(frozen=True)
class Report:
    """All that was found out."""

    inspection: "Inspection"
    verifier: Path | None = None
    drafter: str | None = None
    """Kind that was tried with the verifier."""
    choice: "ConventionChoice | None" = None
    self_test: "SelfTest | None" = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        fields = self.inspection.as_dict()
        if self.verifier is None:
            return fields | {"verifier": None, "drafter": None, "measured_convention": None, "self_test": None}
        measured = None
        if self.choice is not None:
            measured = {"chosen": self.choice.best.convention._asdict(), **self.choice.as_dict()}
        return fields | {
            "verifier": str(self.verifier),
            "drafter": self.drafter,
            "measured_convention": measured,
            "self_test": None if self.self_test is None else self.self_test.as_dict(),
        }


def inspect_command(config: InspectConfig, folder: Path, as_json: bool, open_engine: OpenEngine) -> None:
    """Print what a folder holds.

    Raises:
        UserError: it is no checkpoint, is not supported, or does not fit the verifier.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json there; give a checkpoint's folder")
    # Importing torch and transformers takes seconds.
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        report = inspect_folder(config, folder, open_engine)
    except (ValueError, OSError) as error:
        raise UserError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    console = Console()
    for table in _tables(report):
        console.print(table)


def inspect_folder(config: InspectConfig, folder: Path, open_engine: OpenEngine) -> Report:
    """Read the folder, and try it with the verifier where one is given.

    Raises:
        ValueError, OSError, UserError: as `inspect_command`.
    """
    import torch

    from wingbeat.runtime.checks.inspection import inspect_head, inspect_model
    from wingbeat.runtime.heads.load import is_head_folder
    from wingbeat.runtime.heads.target import TargetDescription

    dtype = getattr(torch, config.resolved_dtype())
    target = None if config.model is None else TargetDescription.from_checkpoint(config.model)
    if is_head_folder(folder):
        inspection = inspect_head(folder, target, dtype)
    else:
        inspection = inspect_model(folder, dtype, torch.device(config.resolved_device()))
    return Report(inspection) if target is None else _try(config, folder, inspection, target, open_engine)


def _try(
    config: InspectConfig, folder: Path, inspection: "Inspection", target: "TargetDescription", open_engine: OpenEngine
) -> Report:
    """Run the folder as a drafter, whether it suits or not."""
    drafter = str(folder)
    if folder.resolve() == target.path.resolve():
        if inspection.mtp is None:
            raise UserError(f"--model {target.path}: the model has no prediction modules to try; give another drafter")
        drafter = "mtp"
    local = LocalConfig(
        model=target.path,
        drafter=drafter,
        allow_bad_drafter=True,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        adaptive=False,
    )
    llm = open_engine(local, _AT_ONCE)
    kind = "mtp" if drafter == "mtp" else "eagle" if inspection.kind == "eagle" else "draft_model"
    return Report(inspection, target.path, kind, llm.convention_choice, llm.self_test)


def _tables(report: Report) -> list[Table]:
    """The folder's content; its layers; the readings that were measured; the self-test."""
    made = [_content(report.inspection)]
    if report.inspection.probe is not None and "layers" in report.inspection.probe:
        made.append(_layers(report.inspection.probe["layers"]))
    if report.choice is not None:
        made.append(_readings(report.choice))
    if report.self_test is not None:
        made.append(_self_test(report.self_test, str(report.verifier)))
    return made


def _content(inspection: "Inspection") -> Table:
    table = Table(title=inspection.path, show_header=False, title_justify="left")
    table.add_row("format", inspection.format)
    for name, value in inspection.shapes.items():
        table.add_row(name, str(value))
    memory = inspection.memory
    table.add_row("parameters", f"{inspection.parameters:,}")
    table.add_row("files", _bytes(inspection.file_bytes))
    table.add_row(f"weights in {memory.dtype}", _bytes(memory.weights_bytes))
    if memory.kv_bytes_per_token:
        table.add_row(f"KV per token in {memory.dtype}", _bytes(memory.kv_bytes_per_token))
    if inspection.convention is not None:
        for name, text in _convention(inspection.convention):
            table.add_row(name, text)
        table.add_row("from the verifier", ", ".join(inspection.from_verifier) or "nothing")
    if inspection.probe is not None:
        table.add_row("as a verifier", _verdict(inspection.probe))
        modules = inspection.mtp
        text = "none" if modules is None else f"{modules['modules']} of {modules['parameters']:,} parameters"
        table.add_row("prediction modules (MTP)", text)
    for note in inspection.notes:
        table.add_row("note", note)
    return table


def _convention(convention: "Convention") -> Iterable[tuple[str, str]]:
    fields = dict(convention.likeliest)
    taps = fields.pop("tap_layers")
    layers = "those of the verifier's depth" if taps is None else str(list(taps))
    yield "taps enter layers", f"{layers} ({convention.source})"
    for name, value in fields.items():
        yield name, "as in the config" if value is None else str(value)
    if convention.open_fields and convention.readings:
        yield "left open by the files", f"{', '.join(convention.open_fields)}: {len(convention.readings)} readings"
    elif convention.open_fields:
        yield "open without the verifier", ", ".join(convention.open_fields)


def _verdict(probe: dict[str, Any]) -> str:
    if not probe["can_be_verifier"]:
        return f"refused: {probe['reason']}"
    return "its attention agrees with transformers' own"


def _layers(groups: list[dict[str, Any]]) -> Table:
    table = Table("layers", "heads", "KV heads", "key size", "value size", "window", title="Attention")
    for group in groups:
        span = str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}"
        sizes = (group[name] for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim"))
        table.add_row(span, *map(str, sizes), str(group["sliding_window"] or "-"))
    return table


def _readings(choice: "ConventionChoice") -> Table:
    differing = [
        name
        for name in choice.best.convention._fields
        if len({getattr(reading.convention, name) for reading in choice.readings}) > 1
    ]
    table = Table("", *differing, "tokens per chain", "accepted by depth", title="Readings of the head")
    for reading in choice.readings:
        values = [getattr(reading.convention, name) for name in differing]
        fields = [str(list(value)) if isinstance(value, tuple) else str(value) for value in values]
        mark = "chosen" if reading is choice.best else ""
        table.add_row(mark, *fields, f"{reading.length:.2f}", " ".join(f"{share:.2f}" for share in reading.by_depth))
    return table


def _self_test(test: "SelfTest", verifier: str) -> Table:
    from wingbeat.runtime.checks.self_test import LEAST_ACCEPTANCE

    outcome = "passed" if test.passed else f"[red]below {LEAST_ACCEPTANCE} at the first position: refused[/red]"
    title = f"Self-test with {verifier}: {outcome}"
    caption = f"{test.metrics.acceptance_length:.2f} tokens per draft"
    table = Table("depth", "accepted if reached", title=title, caption=caption, title_justify="left", min_width=40)
    for position, rate in enumerate(test.metrics.acceptance_rate_per_pos()):
        table.add_row(str(position + 1), f"{rate:.3f}")
    return table


def _bytes(number: int) -> str:
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
