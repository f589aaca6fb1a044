"""Figures of one comparison of speculative decoding with plain decoding."""

from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.deployments.bench.options import BenchConfig
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.metrics import SpeculationMetrics

if TYPE_CHECKING:
    from rich.table import Table


class Report(NamedTuple):
    """Speed of both modes. If the prompts were run several times, each figure is a median."""

    num_prompts: int
    num_tokens: int
    """Number of tokens generated in a pass."""
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    same_tokens: bool
    """Whether all passes, of both modes, produced the same tokens."""
    metrics: SpeculationMetrics
    tokens_a_round: float
    """Mean number of tokens that a request gets per round of the speculative mode; first tokens are not counted."""
    break_even: float | None
    """Tokens per round at which speculation would be as fast as plain decoding. The number is the time of a speculative
    round divided by the time of a plain round. None if there were no drafts.
    """

    @property
    def speedup(self) -> float:
        """Ratio of speculative to plain throughput."""
        return self.speculative_tokens_per_s / self.plain_tokens_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, as printed with `--json`."""
        return {
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "plain_tokens_per_s": round(self.plain_tokens_per_s, 2),
            "speculative_tokens_per_s": round(self.speculative_tokens_per_s, 2),
            "speedup": round(self.speedup, 3),
            "same_tokens": self.same_tokens,
            "metrics": {"speculative_decoding": self.metrics.as_dict()},
        }


def tables(report: Report, config: BenchConfig) -> "list[Table]":
    """Return two tables: the speed of both modes, and the acceptance at each depth of the draft tree."""
    from rich.table import Table

    length = f"{report.metrics.acceptance_length:.2f}"
    same = "same tokens in both" if report.same_tokens else "[red]tokens differ[/red]"
    if config.forced_acceptance is not None:
        same = f"acceptance forced to {ForcedAcceptance(config.forced_acceptance)}: the text is not the model's"
    most = "" if config.dataset is None else "at most "
    title = f"{report.num_prompts} prompts x {most}{config.max_tokens} tokens, batch {config.batch_size[0]}, {same}"
    speed = Table("", "tokens/s", "ms/token", "acceptance length", "ratio", title=title)
    plain, speculative = report.plain_tokens_per_s, report.speculative_tokens_per_s
    speed.add_row("plain", f"{plain:.1f}", f"{1000 / plain:.2f}", "-", "1.00")
    speed.add_row("speculative", f"{speculative:.1f}", f"{1000 / speculative:.2f}", length, f"{report.speedup:.2f}")
    depth = Table("depth", "accepted if reached", title="Acceptance per position")
    for position, rate in enumerate(report.metrics.acceptance_rate_per_pos()):
        depth.add_row(str(position + 1), f"{rate:.3f}")
    return [speed, depth]


def category_table(reports: dict[str, Report], every: Report, left_out: int) -> "Table":
    """Return the table of acceptance and speed by category; `left_out` is the number of turns that were too long to
    run.
    """
    from rich.table import Table

    columns = ("category", "answers", "length", "rate", "plain", "speculative", "ratio")
    caption = f"turns left out, too long for the context: {left_out}" if left_out else None
    table = Table(*columns, title="By category: acceptance length and rate, tokens/s", caption=caption)
    for name, one in (*reports.items(), ("all questions", every)):
        counts = one.metrics.as_dict()
        acceptance = (counts["acceptance_length"], counts["draft_acceptance_rate"])
        figures = (*acceptance, one.plain_tokens_per_s, one.speculative_tokens_per_s, one.speedup)
        table.add_row(name, str(one.num_prompts), *(f"{figure:.2f}" for figure in figures))
    return table
