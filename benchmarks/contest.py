"""Contests between servers or engines that take turns with the same work, and the tables that compare them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from http_load import LoadClient
from report import Table, middle, spread
from workload import Prompt


class Outcome(NamedTuple):
    """Result of one turn of one contestant."""

    tokens_per_s: float
    answers: list[Any]
    """Answers by prompt; comparable within one table only."""
    ttft_ms: float = float("nan")
    """Median time to first token over the prompts, in ms; NaN if not measured by a client."""
    tpot_ms: float = float("nan")
    """Median time per output token over the prompts, in ms; NaN if not measured by a client."""


@dataclass
class Contestant:
    """A way to generate, with its turns so far by load."""

    name: str
    threads: str
    run: Callable[[list[Prompt], int, int], Outcome]
    """(prompts, number of concurrent requests, tokens per prompt) -> Outcome."""
    turns: dict[int, list[Outcome]] = field(default_factory=dict)

    def tokens_per_s(self, size: int) -> float:
        """Median tokens per second over the turns at one load."""
        return middle([turn.tokens_per_s for turn in self.turns[size]])


def http_contestant(
    client: LoadClient, name: str, threads: str, url: str, body_of: Callable[[Prompt, int], dict[str, Any]]
) -> Contestant:
    """Contestant that streams from a server, with the requested concurrency."""

    def run(prompts: list[Prompt], size: int, max_tokens: int) -> Outcome:
        block = client.run_block(url, [body_of(prompt, max_tokens) for prompt in prompts], size)
        short = [trace.num_tokens for trace in block.traces if trace.num_tokens != max_tokens]
        if short:
            raise RuntimeError(f"{name} answered with {short[0]} tokens, {max_tokens} were asked for")
        ttft_ms, tpot_ms = (
            1e3 * middle([getattr(trace, name) for trace in block.traces]) for name in ("ttft_s", "tpot_s")
        )
        return Outcome(block.tokens_per_s, [trace.text for trace in block.traces], ttft_ms, tpot_ms)

    return Contestant(name, threads, run)


def compete(contestants: list[Contestant], args: argparse.Namespace, prompts: list[Prompt]) -> None:
    """Runs every load, repeat and contestant in turn.

    The first turn of each contestant is a warm-up and not counted.
    """
    for size in args.sizes:
        chosen = prompts[: max(args.prompts, size)]
        for repeat in range(args.repeats + 1):
            for contestant in contestants:
                turn = contestant.run(chosen, size, args.max_tokens)
                if repeat:
                    contestant.turns.setdefault(size, []).append(turn)


def versus_table(contestants: list[Contestant], sizes: list[int], title: str, repeats: int) -> Table:
    """Table with one row per load and contestant; ratios are relative to the first contestant."""
    rows = []
    base = contestants[0]
    for size in sizes:
        expected = base.turns[size][0].answers
        for contestant in contestants:
            turns = contestant.turns[size]
            same = sum(answer == want for answer, want in zip(turns[0].answers, expected, strict=True))
            rows.append(
                (
                    str(size),
                    contestant.name,
                    contestant.threads,
                    spread([turn.tokens_per_s for turn in turns]),
                    f"{contestant.tokens_per_s(size) / base.tokens_per_s(size):.2f}",
                    f"{same}/{len(expected)}",
                )
            )
    columns = ("at once", "", "threads", "tokens/s", f"ratio to {base.name}", "same answers")
    return Table(title, columns, rows, f"Medians of {repeats} repeats with their range; the ratio is of medians.")


def figures(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Measurements for the JSON file."""
    return [
        {
            "name": one.name,
            "threads": one.threads,
            "at_once": size,
            "tokens_per_s": one.tokens_per_s(size),
            "tokens_per_s_of_repeats": [turn.tokens_per_s for turn in turns],
            "ttft_ms": middle([turn.ttft_ms for turn in turns]),
            "tpot_ms": middle([turn.tpot_ms for turn in turns]),
        }
        for one in contestants
        for size, turns in one.turns.items()
    ]
