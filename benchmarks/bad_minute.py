"""A server that starts while other work keeps the machine busy, and what its policy decides once that work has ended.

    .venv/bin/python benchmarks/bad_minute.py [--busy 4] [--starts 3]

Costs are measured as the server starts, beside busy processes that then end. Counted are the rounds from there until
the policy drafts by its own choice, and until it does so in nine of ten rounds; requests come one at a time. Then the
server starts again, undisturbed, from what the first one has kept on disk. Each pair of starts has a cache folder of
its own.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from http_load import LoadClient
from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, quiet
from report import Report, Table, machine_facts, model_facts
from servers import App, wingbeat_apps
from serving import request_body
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.kernels.disk_cache import cache_dir
from wingbeat.runtime.tokenizer import Tokenizer

TOKENS, ROUNDS = 128, 400
"""Of each request; and that are watched."""
OFTEN = 0.9
SPECULATE = "speculate"
KERNELS = "kernels"
"""Folder of the cache with the compiled kernels, which are no measurement."""


class Watched(NamedTuple):
    """Rounds after a start, until something was seen; None where it never was."""

    first: int | None
    """The policy drafted by its own choice."""
    often: int | None
    """It did so in nine of ten rounds."""
    rounds: int
    decisions: dict[str, int]


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that compute and do nothing else, until the block ends."""
    own = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in own:
            process.kill()
            process.wait()


@contextlib.contextmanager
def empty_cache() -> Iterator[Path]:
    """A cache folder without measurements, in this process's environment until the block ends."""
    kernels, before = cache_dir() / KERNELS, os.environ.get("WINGBEAT_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        kernels.mkdir(parents=True, exist_ok=True)
        (Path(folder) / KERNELS).symlink_to(kernels)
        os.environ["WINGBEAT_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["WINGBEAT_CACHE_DIR"]
            if before is not None:
                os.environ["WINGBEAT_CACHE_DIR"] = before


def watch(app: App, client: LoadClient, prompts: list[Prompt]) -> Watched:
    """Requests one after the other; decisions are looked at after each."""
    model, first, often = client.model_name(app.url), None, None
    stats = app.stats()
    began, rounds, seen = stats["phases"]["num_rounds"], 0, dict(stats["policy"]["decisions"])
    start, number = dict(seen), 0
    while rounds < ROUNDS:
        client.run_block(app.url, [request_body(model, prompts[number % len(prompts)], TOKENS)], 1)
        number += 1
        stats = app.stats()
        rounds, decisions = stats["phases"]["num_rounds"] - began, stats["policy"]["decisions"]
        new = since(decisions, seen)
        decided = sum(count for reason, count in new.items() if reason != "idle")
        if first is None and new.get(SPECULATE, 0):
            first = rounds
        if often is None and decided and new.get(SPECULATE, 0) >= OFTEN * decided:
            often = rounds
        seen = dict(decisions)
    return Watched(first, often, rounds, since(seen, start))


def since(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Decisions that have come."""
    return {reason: count - before.get(reason, 0) for reason, count in now.items() if count > before.get(reason, 0)}


def run_starts(pair: Pair, args: argparse.Namespace, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Pairs of starts: beside busy processes, and from what the first has kept."""
    settings = {"model": pair.model, "drafter": str(pair.drafter), "max_model_len": MAX_MODEL_LEN}
    config = AppConfig(**settings, served_model_name="benchmark", enable_prefix_caching=False)
    found = []
    for _ in range(args.starts):
        with empty_cache() as folder:
            for number in (args.busy, 0):
                with contextlib.ExitStack() as stack:
                    with busy(number):
                        apps = stack.enter_context(wingbeat_apps({"app": config}))
                    read = one_row_ms(folder)
                    watched = watch(apps["app"], stack.enter_context(LoadClient()), prompts)
                    left = one_row_ms(folder)
                found.append({"busy": number, **watched._asdict(), "kept_ms": read, "corrected_ms": left})
    return found


def one_row_ms(folder: Path) -> float | None:
    """Milliseconds of a pass of one row by what is kept; None where nothing is."""
    kept = next(iter(folder.glob("verifier-*.json")), None)
    if kept is None:
        return None
    return round(1e3 * json.loads(kept.read_text())["verify_s"][0][0], 3)


def table(found: list[dict[str, Any]]) -> Table:
    """One row per start."""

    def said(value: object) -> str:
        return "-" if value is None else str(value)

    names = ("first", "often", "rounds", "kept_ms", "corrected_ms")
    rows = []
    for start in found:
        decisions = ", ".join(f"{reason} {count}" for reason, count in sorted(start["decisions"].items()))
        rows.append((str(start["busy"]), *(said(start[name]) for name in names), decisions))
    columns = ("busy processes", "rounds until it drafts", "until in 9 of 10", "rounds watched")
    kept = ("pass of one row on disk, ms", "and at the end", "decisions")
    note = "Rounds count from the end of the busy processes, by whole requests."
    return Table("Starts in a bad minute", columns + kept, rows, note)


def run(args: argparse.Namespace) -> Report:
    """Every start."""
    pair = chosen_pair(args)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, 16)
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; greedy, {TOKENS} tokens each, one at a time, over HTTP"
    found = run_starts(pair, args, prompts)
    return Report("Bad minute", facts, [table(found)], {"starts": found})


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--busy", type=int, default=4, help="processes")
    parser.add_argument("--starts", type=int, default=3, help="pairs of them")
    args = parser.parse_args()
    if args.quick:
        args.busy, args.starts = 1, 1
    quiet()
    report = run(args)
    report.finish(args, "bad_minute")


if __name__ == "__main__":
    main()
