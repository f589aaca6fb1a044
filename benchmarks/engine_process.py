"""An engine in process, in an engine process without HTTP, and over HTTP: milliseconds per round.

    .venv/bin/python benchmarks/engine_process.py [--threads 1 2] [--ways process own http] [--out FILE]

Blocks of plain and of speculative requests alternate between the three ways, so that a drift of the machine affects all
alike; figures are medians over the repeats. The time of a round is that of a whole block divided by its rounds, so it
includes the time between rounds. Full chains are drafted, so that rounds are comparable.
"""

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from http_load import LoadClient
from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, greedy, open_llm, quiet
from process_engine import ThreadWatch, generate, process_engine
from report import Report, Table, machine_facts, middle, model_facts, spread
from servers import wingbeat_apps
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.tokenizer import Tokenizer

IN_PROCESS, OWN, HTTP = "process", "own", "http"
WAYS = {IN_PROCESS: "in process", OWN: "in the engine's process", HTTP: "over HTTP"}


class Block(NamedTuple):
    """A block of concurrent requests, from the first one's start to the last one's end."""

    way: str
    threads: int
    speculation: bool
    concurrency: int
    elapsed_s: float
    num_rounds: int
    inside_s: float
    """Time within the engine's rounds, in seconds."""
    num_tokens: int
    thread_shares: list[dict[str, Any]]

    @property
    def key(self) -> tuple[bool, int]:
        """Properties by which blocks of different ways are matched."""
        return self.speculation, self.concurrency


class Way(NamedTuple):
    """An engine that is ready to run blocks."""

    name: str
    threads: int
    run: Callable[[list[Prompt], bool, int], int]
    """(prompts, whether to speculate, tokens per prompt) -> total number of tokens. Runs all prompts concurrently."""
    figures: Callable[[], dict[str, Any]]
    """Returns the engine's statistics, with its process as `engine_pid`."""


def measured(way: Way, prompts: list[Prompt], speculation: bool, max_tokens: int) -> Block:
    """Runs and measures one block."""
    before = way.figures()
    watch = ThreadWatch(before["engine_pid"])
    started = time.perf_counter()
    num_tokens = way.run(prompts, speculation, max_tokens)
    elapsed_s = time.perf_counter() - started
    shares = watch.shares()
    then, now = before["phases"], way.figures()["phases"]
    inside_s = sum(now[name] - then[name] for name in now if name.endswith("_s"))
    num_rounds = now["num_rounds"] - then["num_rounds"]
    return Block(way.name, way.threads, speculation, len(prompts), elapsed_s, num_rounds, inside_s, num_tokens, shares)


def app_config(pair: Pair, threads: int) -> AppConfig:
    """Configuration of the application; every way uses an engine with this configuration."""
    return AppConfig(
        model=pair.model,
        drafter=str(pair.drafter),
        served_model_name="benchmark",
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        adaptive=False,
        threads=threads,
    )


@contextlib.contextmanager
def in_process(pair: Pair, threads: int) -> Iterator[Way]:
    """Engine with both models in this process, on one thread."""
    speculation = SpeculationConfig.default("cpu", adaptive=False)
    llm = open_llm(pair, max_num_seqs=AppConfig().most_num_seqs(), threads=threads, speculation=speculation)

    def run(prompts: list[Prompt], speculates: bool, max_tokens: int) -> int:
        params = [greedy(max_tokens, speculates)] * len(prompts)
        return sum(len(one.token_ids) for one in llm.generate([prompt.token_ids for prompt in prompts], params))

    yield Way(
        IN_PROCESS, threads, run, lambda: {"phases": vars(llm.engine.stats().phases).copy(), "engine_pid": os.getpid()}
    )


@contextlib.contextmanager
def in_own_process(pair: Pair, threads: int) -> Iterator[Way]:
    """Engine in a process of its own, as in a replica, without Ray and HTTP."""
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        context = process_engine(app_config(pair, threads))
        client = runner.run(context.__aenter__())
        stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))

        async def figures() -> dict[str, Any]:
            told = await client.call("figures")
            return {"phases": told.stats["phases"], "engine_pid": told.pid}

        def run(prompts: list[Prompt], speculates: bool, max_tokens: int) -> int:
            params = greedy(max_tokens, speculates)
            tokens = runner.run(generate(client, [prompt.token_ids for prompt in prompts], params))
            return sum(map(len, tokens))

        yield Way(OWN, threads, run, lambda: runner.run(figures()))


@contextlib.contextmanager
def over_http(pair: Pair, threads: int) -> Iterator[Way]:
    """The whole application, streaming to a client in this process."""
    with wingbeat_apps({"app": app_config(pair, threads)}) as apps, LoadClient() as client:
        app = apps["app"]

        def run(prompts: list[Prompt], speculates: bool, max_tokens: int) -> int:
            bodies = [
                {
                    "model": "benchmark",
                    "prompt": prompt.token_ids,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream_options": {"include_usage": True},
                    "speculation": {"enabled": speculates},
                }
                for prompt in prompts
            ]
            return client.run_block(app.url, bodies, len(bodies)).num_tokens

        yield Way(HTTP, threads, run, app.stats)


OPEN = {IN_PROCESS: in_process, OWN: in_own_process, HTTP: over_http}


def measure(pair: Pair, threads: int, prompts: list[Prompt], args: argparse.Namespace) -> list[Block]:
    """Runs all ways side by side; the first block of each kind is a warm-up and not counted."""
    blocks = []
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(OPEN[name](pair, threads)) for name in args.ways]
        for repeat in range(args.repeats + 1):
            for concurrency in args.concurrency:
                for speculation in (False, True):
                    for way in ways:
                        block = measured(way, prompts[:concurrency], speculation, args.max_tokens)
                        blocks += [block] if repeat else []
    return blocks


def round_ms(blocks: list[Block]) -> list[float]:
    """Milliseconds per round of each block."""
    return [1e3 * block.elapsed_s / max(1, block.num_rounds) for block in blocks]


def table(blocks: list[Block], threads: int) -> Table:
    """Table with one row per load; percentages are relative to the first way."""
    mine = [block for block in blocks if block.threads == threads]
    ways = list(dict.fromkeys(block.way for block in mine))
    rows = []
    for speculation, concurrency in dict.fromkeys(block.key for block in mine):
        cells, base = [], 0.0
        for way in ways:
            same = [block for block in mine if block.way == way and block.key == (speculation, concurrency)]
            ms = middle(round_ms(same))
            base = base or ms
            inside = middle([1e3 * block.inside_s / max(1, block.num_rounds) for block in same])
            rate = middle([block.num_tokens / block.elapsed_s for block in same])
            cells.append(f"{spread(round_ms(same), 2)}, {inside:.2f}, {rate:.0f}, {ms / base - 1:+.0%}")
        rows.append((f"{'speculating' if speculation else 'plain'}, {concurrency}", *cells))
    note = "A round in ms, from block to block (range); of it within the round; tokens/s; more than the first way."
    return Table(f"A round by where its engine runs, threads {threads}", ("", *(WAYS[way] for way in ways)), rows, note)


def thread_table(blocks: list[Block]) -> Table:
    """Table of each engine thread's share of a core, in the last plain and speculating block of each way."""
    last = {(block.threads, block.way, *block.key): block for block in blocks}
    rows = [
        (
            f"threads {block.threads}, {WAYS[block.way]}, {'speculating' if block.speculation else 'plain'}, "
            f"{block.concurrency}",
            "  ".join(f"{one['name']} {one['share']:.2f} on {one['core']}" for one in block.thread_shares[:4]),
        )
        for block in last.values()
    ]
    return Table("Threads of the engine's process", ("", "share of a core, and the core it ran on last"), rows)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--out", type=Path, dest="output", help="the same as --output")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.concurrency, args.max_tokens, args.repeats = [1, 2], 16, 1
    quiet()
    pair = chosen_pair(args)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, max(args.concurrency))
    blocks = [block for threads in args.threads for block in measure(pair, threads, prompts, args)]
    facts = {**machine_facts(), **model_facts(*pair), "workload": f"{describe(prompts)}; {args.max_tokens} tokens each"}
    tables = [table(blocks, threads) for threads in args.threads] + [thread_table(blocks)]
    report = Report("A round by where its engine runs", facts, tables, {"blocks": [one._asdict() for one in blocks]})
    report.show()
    if args.output is not None:
        report.save(args.output)


if __name__ == "__main__":
    main()
