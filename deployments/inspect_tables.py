"""The report of `wingbeat inspect` for people."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from wingbeat.deployments.inspect import Report
from wingbeat.runtime.convention_choice import ConventionChoice
from wingbeat.runtime.drafters.draft_head import HeadConvention
from wingbeat.runtime.inspection import Convention, Inspection
from wingbeat.runtime.self_test import LEAST_ACCEPTANCE, SelfTest


def tables(report: Report) -> list[Table]:
    """The folder's content; its layers; the readings that were measured; the self-test."""
    made = [_content(report.inspection)]
    if report.inspection.probe is not None and "layers" in report.inspection.probe:
        made.append(_layers(report.inspection.probe["layers"]))
    if report.choice is not None:
        made.append(_readings(report.choice))
    if report.self_test is not None:
        made.append(_self_test(report.self_test, str(report.verifier)))
    return made


def _content(inspection: Inspection) -> Table:
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


def _convention(convention: Convention) -> Iterable[tuple[str, str]]:
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


def _readings(choice: ConventionChoice) -> Table:
    differing = [
        name
        for name in HeadConvention._fields
        if len({getattr(reading.convention, name) for reading in choice.readings}) > 1
    ]
    table = Table("", *differing, "tokens per chain", "accepted by depth", title="Readings of the head")
    for reading in choice.readings:
        values = [getattr(reading.convention, name) for name in differing]
        fields = [str(list(value)) if isinstance(value, tuple) else str(value) for value in values]
        mark = "chosen" if reading is choice.best else ""
        table.add_row(mark, *fields, f"{reading.length:.2f}", " ".join(f"{share:.2f}" for share in reading.by_depth))
    return table


def _self_test(test: SelfTest, verifier: str) -> Table:
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
