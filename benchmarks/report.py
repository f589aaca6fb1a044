"""Report of a benchmark: facts about the machine and versions, tables, and all measurements as JSON."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rich.table
import torch
from rich.console import Console

from wingbeat.runtime.hugging_face import read_config

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH = 160
"""Width of tables written to a file, in characters."""
PACKAGES = ("wingbeat", "torch", "transformers", "ray")


@dataclass(frozen=True)
class Table:
    """Table of text cells with a title; the first column holds names, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """Formats the table as markdown."""
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---"] + ["---:"] * (len(self.columns) - 1))]
        lines += [_line(row) for row in self.rows]
        return "\n".join(lines + (["", self.note] if self.note else []))

    def rich(self) -> rich.table.Table:
        """Formats the table for a terminal."""
        table = rich.table.Table(title=self.title, caption=self.note or None)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


@dataclass(frozen=True)
class Report:
    """Report of one run of one benchmark."""

    name: str
    facts: dict[str, str]
    """Facts about the machine, model and workload, as text."""
    tables: list[Table]
    figures: dict[str, Any]
    """All measurements, for programs."""

    def show(self) -> None:
        """Print it."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)
        for key, value in self.facts.items():
            console.print(f"{key}: {value}", highlight=False, soft_wrap=True)
        for table in self.tables:
            console.print(table.rich())

    def finish(self, args: argparse.Namespace, name: str) -> None:
        """Print it, and write it to `args.output`, or among the results, unless `args.quick`."""
        self.show()
        output = args.output or (None if args.quick else RESULTS / f"{name}.json")
        if output is not None:
            self.save(output)

    def save(self, path: Path) -> None:
        """Writes the figures as JSON to `path`, and the tables as markdown beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"facts": self.facts, "figures": self.figures}, indent=1) + "\n", encoding="utf-8")
        facts = "\n".join(f"- {key}: {value}" for key, value in self.facts.items())
        text = "\n\n".join([f"# {self.name}", facts, *(table.markdown() for table in self.tables)])
        path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        print(f"written: {path} and {path.with_suffix('.md').name}")


def machine_facts() -> dict[str, str]:
    """Facts about hardware, load and versions."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start",
        "gpu": gpu,
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


def model_facts(model: Path, drafter: str | Path) -> dict[str, str]:
    """Architecture and size of a verifier, and its drafter."""
    config = read_config(model).get_text_config()
    shape = (
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads}/{getattr(config, 'num_key_value_heads', None) or config.num_attention_heads} "
        f"heads, vocabulary {config.vocab_size}"
    )
    drafter = Path(drafter)
    drafter_name = f"{drafter.name} ({_megabytes(drafter)})" if drafter.is_dir() else str(drafter)
    return {
        "model": f"{Path(model).name} ({type(config).__name__}: {shape}; {_megabytes(Path(model))})",
        "drafter": drafter_name,
    }


def middle(values: Sequence[float]) -> float:
    """Median; NaN if there are no values."""
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Formats median and range."""
    return f"{middle(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _megabytes(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{size / 1e6:.1f} MB"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def save_picture(figure: Any, path: Path) -> None:
    """Saves a matplotlib figure with a single plot, with grid and legend."""
    (axes,) = figure.axes
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    print(f"written: {path}")
