"""Options, tables and plot shared by `learning.py` and `learning_http.py`."""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from domains import DOMAINS
from narrow_head import OLD, add_head_options
from report import RESULTS, Report, Table, machine_facts, middle, model_facts, save_picture

from wingbeat.deployments.app_config import AppConfig

TOLD = ("steps", "seconds", "samples")


def add_learning_options(parser: argparse.ArgumentParser, name: str, **default: float) -> None:
    """Adds the options of both scripts.

    Args:
        name: name of the script.
        default: defaults of `minutes`, `every` and `prompts`.
    """
    new = [domain for domain in DOMAINS if domain != OLD]
    parser.add_argument("--domain", choices=new, nargs="+", default=new, help="domains of the requests, in turn")
    add_head_options(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=default["minutes"], help="minutes of requests")
    parser.add_argument("--every", type=float, default=default["every"], help="minutes between two marks")
    parser.add_argument(
        "--prompts", type=int, default=default["prompts"], help="held-out prompts of each domain at a mark"
    )
    parser.add_argument("--core-share", type=float, default=0.5, help="share of a core for the learner")
    parser.add_argument("--quick", action="store_true", help="a minute and a few steps: checks that the script works")
    parser.add_argument("--plot", type=Path, help="file for a plot of tokens per round over time")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    parser.set_defaults(name=name, model=None)


class Mark(NamedTuple):
    """Measurement of the learning and the static server at one time."""

    minutes: float
    version: int
    num_tokens: int
    """Tokens served to the clients so far."""
    learner_s: float
    """Core seconds that the learner has trained for."""
    lengths: dict[str, tuple[float, float]]
    """Tokens per round by domain (the old one last): (learning, static)."""

    def new(self, server: int) -> float:
        """Mean over the new domains; 0 selects the learning server, 1 the static one."""
        return sum(pair[server] for pair in list(self.lengths.values())[:-1]) / (len(self.lengths) - 1)

    def gain(self) -> float:
        """Relative gain in tokens per round on the new domains."""
        return self.new(0) / self.new(1) - 1

    def line(self) -> str:
        """A line for the terminal."""
        each = ", ".join(f"{domain} {now:.3f} ({still:.3f})" for domain, (now, still) in self.lengths.items())
        return (
            f"{self.minutes:5.1f} min, {self.num_tokens} tokens, learner {self.learner_s:.0f} s: "
            f"version {self.version}, new domains {self.gain():+.1%}; {each}"
        )


class Speeds(NamedTuple):
    """Tokens per second of one turn."""

    at_work: float
    """Learning server with the learner running."""
    alone: float
    """Learning server with the learner's process stopped."""
    static: float


def _cells(pair: tuple[float, float]) -> str:
    now, still = pair
    return f"{now:.2f} / {still:.2f} ({now / still - 1:+.1%})"


def table_of(marks: list[Mark]) -> Table:
    """Table of the marks over time."""
    rows = [
        (
            f"{mark.minutes:g} min",
            f"{mark.num_tokens:,}",
            f"{mark.learner_s:.0f}",
            str(mark.version),
            f"{mark.gain():+.1%}",
            *map(_cells, mark.lengths.values()),
        )
        for mark in marks
    ]
    columns = ("traffic", "tokens served", "learner, s", "version", "new domains", *marks[0].lengths)
    note = "Tokens per round with drafts, learning / static, on held-out prompts; the last column is the old domain."
    return Table("Learning while serving", columns, rows, note)


def speed_table(speeds: list[Speeds]) -> Table:
    """Table of the medians of the turns' speed ratios."""
    ratios = {
        "learner at work / learner stopped": [one.at_work / one.alone for one in speeds],
        "learner at work / static server": [one.at_work / one.static for one in speeds],
        "learner stopped / static server": [one.alone / one.static for one in speeds],
    }
    rows = [(name, f"{middle(found):.2f}", f"{min(found):.2f}-{max(found):.2f}") for name, found in ratios.items()]
    return Table("Tokens per second on the new domains, at the end", ("", "median of turns", "range"), rows)


def plot(marks: list[Mark], path: Path) -> None:
    """Plots tokens per round over time, with head swaps annotated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    minutes = [mark.minutes for mark in marks]
    old = list(marks[0].lengths)[-1]
    axes.plot(minutes, [mark.new(0) for mark in marks], "o-", color="tab:green", label="new domains, learning")
    axes.plot(minutes, [mark.new(1) for mark in marks], "--", color="tab:green", label="new domains, static")
    axes.plot(minutes, [mark.lengths[old][0] for mark in marks], "s-", color="tab:gray", label=f"{old}, learning")
    axes.plot(minutes, [mark.lengths[old][1] for mark in marks], "--", color="tab:gray", label=f"{old}, static")
    for before, mark in itertools.pairwise(marks):
        if mark.version != before.version:
            axes.annotate(
                f"v{mark.version}", (mark.minutes, mark.new(0)), (0, 6), textcoords="offset points", fontsize=8
            )
    axes.set_ylim(bottom=1)
    axes.set_xlabel("minutes of traffic, four requests at once")
    axes.set_ylabel("tokens per round, held-out prompts")
    save_picture(figure, path)


def finish(
    options: argparse.Namespace, marks: list[Mark], speeds: list[Speeds], said: dict[str, Any], quiet: bool = False
) -> None:
    """Prints and saves the report.

    Args:
        said: final state of the ledger and the learner.
        quiet: saves without printing.
    """
    config, output = AppConfig(), options.output or RESULTS / f"{options.name}.json"
    if options.model is not None:
        facts = machine_facts() | {"model": options.model, "drafter": options.head}
    else:
        facts = machine_facts() | model_facts(config.model_dir(), config.choice().source)
        if options.head != "demo":
            steps = f", {options.head_steps} steps on Python alone" if options.head == "narrow" else ""
            facts["drafter"] = f"{Path(options.head).name}: of the demo head's shape{steps}"
    facts["workload"] = f"{', '.join(options.domain)} in turn, temperature {options.temperature:g}"
    facts["learner"] = (
        f"{options.core_share:g} of a core, {json.dumps({name: said['learner'].get(name) for name in TOLD})}"
    )
    facts["decisions"] = json.dumps(said["counts"])
    figures = {"marks": [mark._asdict() for mark in marks], "speeds": [one._asdict() for one in speeds]}
    tables = [table_of(marks)] + ([speed_table(speeds)] if speeds else [])
    report = Report(
        "Learning while serving",
        facts,
        tables,
        figures | {"drafter": {name: found for name, found in said.items() if name != "folder"}},
    )
    if not quiet:
        report.show()
    if options.output is not None or not options.quick:
        report.save(output)
        if options.plot is not None:
            plot(marks, options.plot)
