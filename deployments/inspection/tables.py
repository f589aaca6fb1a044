"""Tables of measurements by `wingbeat inspect`: a model's layers, the readings of a head, the self-test."""

from typing import Any

from rich.table import Table

from wingbeat.runtime.engine_checks.self_test import LEAST_ACCEPTANCE

Findings = dict[str, Any]
"""Content of the output of `--json`."""


def layers_table(groups: list[Findings]) -> Table:
    """Return the table of a model's layers; successive layers with equal attention form one row."""
    table = Table("layers", "heads", "KV heads", "key size", "value size", "window", title="Attention")
    for group in groups:
        span = str(group["first"]) if group["first"] == group["last"] else f"{group['first']}-{group['last']}"
        sizes = (group[name] for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim"))
        table.add_row(span, *map(str, sizes), str(group["sliding_window"] or "-"))
    return table


def readings_table(chosen: Findings, readings: list[Findings]) -> Table:
    """Return a table of the readings of a head (interpretations of its weights, see `HeadConvention`), with the
    acceptance under each reading. The table also shows which reading was chosen.
    """
    differing = [name for name in chosen if len({reading["convention"][name] for reading in readings}) > 1]
    table = Table("", *differing, "tokens per chain", "accepted by depth", title="Readings of the head")
    for reading in readings:
        values = [reading["convention"][name] for name in differing]
        fields = [str(list(value)) if isinstance(value, tuple) else str(value) for value in values]
        mark, shares = "chosen" if reading["convention"] == chosen else "", reading["by_depth"]
        table.add_row(mark, *fields, f"{reading['length']:.2f}", " ".join(f"{share:.2f}" for share in shares))
    return table


def self_test_table(test: Findings, verifier: str) -> Table:
    """Return a table with the acceptance of a drafter's chains at each depth."""
    outcome = "passed" if test["passed"] else f"[red]below {LEAST_ACCEPTANCE} at the first position: refused[/red]"
    title = f"Self-test with {verifier}: {outcome}"
    caption = f"{test['acceptance_length']:.2f} tokens per draft"
    table = Table("depth", "accepted if reached", title=title, caption=caption, title_justify="left", min_width=40)
    for position, rate in enumerate(test["acceptance_rate_per_pos"]):
        table.add_row(str(position + 1), f"{rate:.3f}")
    return table
