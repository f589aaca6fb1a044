"""Compares several drafters of one verifier at several loads, and shows the results in a table. Each run has a separate
process.
"""

import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.bench.options import AskedOnce, BenchConfig
from wingbeat.deployments.bench.passes import report_of, run_questions
from wingbeat.deployments.bench.questions import Question, read_questions
from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.log import LEVEL_VARIABLE, show_log

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = {
    "batch_size": "at\nonce",
    "drafter": "\ndrafter",
    "speculative_tokens_per_s": "\ntok/s",
    "speedup": "over\nplain",
    "tokens_a_round": "tokens\na round",
    "break_even_tokens_a_round": "break-\neven",
    "memory_mib": "memory,\nMiB",
    "dollars_per_million_tokens": "$ per M\ntokens",
}
"""Column titles of the comparison table, by the names of the figures."""


def compare(config: BenchConfig) -> "tuple[dict[str, Any], list[Table]]":
    """Measure every drafter at every load; returns the figures and the comparison table.

    A run that fails is left out of the table and named below it.

    Raises:
        UserError: an option is unsuitable (the error names the option), or all runs fail.
    """
    runs, rows, failures = config.alone(), [], {}
    for run in runs:
        if (count := len(questions_of(run))) < run.batch_size[0]:
            raise UserError(f"--batch-size {run.batch_size[0]}: there are {count} prompts to run at once")
    for run in runs:
        print(f"wingbeat: {run.drafter[0]}, {run.batch_size[0]} at once", file=sys.stderr, flush=True)
        try:
            figures = in_own_process(run)
        except UserError as error:
            failures[f"{run.drafter[0]}, {run.batch_size[0]} at once"] = str(error)
            print(f"wingbeat: {error}", file=sys.stderr, flush=True)
            continue
        row = {"batch_size": run.batch_size[0], "drafter": run.drafter[0], **figures}
        per_second = config.price_per_hour and config.price_per_hour / 3600
        row["dollars_per_million_tokens"] = per_second and per_second * 1e6 / row["speculative_tokens_per_s"]
        rows.append(row)
    if not rows:
        raise UserError(next(iter(failures.values())))
    ranked = sorted(rows, key=lambda row: (row["batch_size"], row["speedup"]))
    found = {
        "dataset": runs[0].dataset,
        "prompts": runs[0].dataset or str(config.prompts or "beginnings of Python code"),
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "runs": rows,
        "failed": failures,
        "fastest": {row["batch_size"]: row["drafter"] if row["speedup"] > 1 else "none" for row in ranked},
    }
    return found, [_table(found)]


def in_own_process(run: AskedOnce) -> dict[str, Any]:
    """Measure in a new process, and return after the process has ended; raises UserError if the measurement fails."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure, run).result()
    except Exception as error:  # for example lack of memory, a killed process, missing files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--drafter {run.drafter[0]}: {reason}") from error


def measure(run: AskedOnce) -> dict[str, Any]:
    """Return the figures of one drafter at one load, by name.

    The memory is the peak of this process, or on a GPU the peak of torch's allocations.
    """
    import torch

    from wingbeat.deployments.local.engine import open_engine

    if LEVEL_VARIABLE in os.environ:
        show_log()
    llm = open_engine(run, run.batch_size[0])
    every, _ = run_questions(llm, run, questions_of(run))
    report = report_of(every)
    on_gpu = run.resolved_device() == "cuda"
    kib = torch.cuda.max_memory_reserved() / 1024 if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds = {"tokens_a_round": report.tokens_a_round, "break_even_tokens_a_round": report.break_even}
    return {**report.as_dict(), **rounds, "memory_mib": kib / 1024}


def questions_of(run: AskedOnce) -> list[Question]:
    """Return the questions or prompts. Every `batch_size` successive questions get a category of their own, because a
    batch contains questions of a single category, and the dataset's own categories would leave some batches smaller
    than the load.
    """
    if run.dataset is None:
        turns = [(text,) for text in run.texts()]
    else:
        turns = [question.turns for question in read_questions(run.dataset, run.num_prompts)]
    return [Question(category=str(index // run.batch_size[0]), turns=one) for index, one in enumerate(turns)]


def _table(found: dict[str, Any]) -> "Table":
    from rich.table import Table

    rows = found["runs"]
    title = (
        f"{rows[0]['num_prompts']} answers x at most {found['max_tokens']} tokens, temperature {found['temperature']}, "
        f"prompts: {found['prompts']}"
    )
    caption = "fastest: " + ", ".join(f"{drafter} at {load}" for load, drafter in found["fastest"].items())
    if found["failed"]:
        caption += f"; [red]failed: {'; '.join(found['failed'])}[/red]"
    if differing := {row["drafter"] for row in rows if not row["same_tokens"]}:
        caption += f"; [red]tokens differ from plain decoding's: {', '.join(differing)}[/red]"
    shown = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    table = Table(*(COLUMNS[name] for name in shown), title=title, caption=caption)
    last = {row["drafter"]: Path(row["drafter"]).name for row in rows}
    unique = len(set(last.values())) == len(last)
    for row in rows:
        figures = ["-" if row[name] is None else row[name] for name in shown]
        figures[shown.index("drafter")] = last[row["drafter"]] if unique else row["drafter"]
        table.add_row(*(f"{one:.2f}" if isinstance(one, float) else str(one) for one in figures))
    return table
