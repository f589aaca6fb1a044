"""Several servers or engines that do the same work in turn, and the tables that compare them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from http_load import LoadClient
from report import Table, middle, spread
from workload import Prompt


class Outcome(NamedTuple):
    """One turn of one contestant."""

    tokens_per_s: float
    answers: list[Any]
    """By prompt, in a form that can be compared within one table."""
    ttft_ms: float = float("nan")
    """Median over the prompts, where a client saw it."""
    tpot_ms: float = float("nan")
    """Likewise."""


@dataclass
class Contestant:
    """One way to generate, and its turns so far under each size of load."""

    name: str
    threads: str
    run: Callable[[list[Prompt], int, int], Outcome]
    """(prompts, how many at once, tokens per prompt)"""
    turns: dict[int, list[Outcome]] = field(default_factory=dict)

    def tokens_per_s(self, size: int) -> float:
        """Median over the turns."""
        return middle([turn.tokens_per_s for turn in self.turns[size]])


def http_contestant(
    client: LoadClient, name: str, threads: str, url: str, body_of: Callable[[Prompt, int], dict[str, Any]]
) -> Contestant:
    """Streams from a server, as many at once as asked."""

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
    """Every size of load, every repeat, every contestant in turn; a first turn of each is not counted."""
    for size in args.sizes:
        chosen = prompts[: max(args.prompts, size)]
        for repeat in range(args.repeats + 1):
            for contestant in contestants:
                turn = contestant.run(chosen, size, args.max_tokens)
                if repeat:
                    contestant.turns.setdefault(size, []).append(turn)


def versus_table(contestants: list[Contestant], sizes: list[int], title: str, repeats: int) -> Table:
    """One row per load and contestant; the first contestant is what the others are compared with."""
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
    """For the JSON file."""
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
