"""Plain, fixed-speculative and adaptive decoding compared under rising load, with a plot.

    .venv/bin/python benchmarks/load_sweep.py [--http] [--model DIR --drafter DIR] [--plot FILE]

In process, one thread, greedy; with `--http` two applications, each with its drafter in a process of its own, where
plain requests disable drafts in the adaptive one. Requests arrive in a closed loop: when one ends, the next one starts,
so that the number of running sequences equals the column's. The modes take turns, block by block, in one order and then
in the other, and ratios are between blocks that ran close together, so that a drift of the machine affects all alike;
figures are medians over the turns. `--forced-acceptance 0.5` simulates a pair with a weak head (`WINGBEAT_BENCHMARK=1`
is set by the script).
"""

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from http_load import LoadClient
from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, greedy, open_llm, quiet
from report import Report, Table, machine_facts, middle, model_facts, save_picture, spread
from servers import App, wingbeat_apps
from serving import request_body, summed
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import BENCHMARK_VARIABLE, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tokenizer import Tokenizer

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
MODES = PLAIN, FIXED, ADAPTIVE = "plain", "speculative", "adaptive"
FIXED_STEPS = 5
PROMPTS_PER_REQUEST, LEAST_PROMPTS, MOST_PROMPTS = 8, 24, 256
"""Prompts per block: enough that the progress of the running requests at its start and end does not decide the
figure."""

TURN = 7
"""Prompts by which each turn starts later, so that other requests run together."""


class Block(NamedTuple):
    """Result of one mode's turn."""

    tokens_per_s: float
    speculation: SpeculationMetrics


class Engines:
    """An engine per mode, in this process."""

    def __init__(self, pair: Pair, max_num_seqs: int, forced: list[float] | None) -> None:
        fixed = SpeculationConfig(FIXED_STEPS, 1, FIXED_STEPS + 1)
        acceptance = None if forced is None else ForcedAcceptance(tuple(forced))
        self.llms = {
            PLAIN: open_llm(Pair(pair.model, "none"), max_num_seqs=max_num_seqs),
            FIXED: open_llm(pair, max_num_seqs=max_num_seqs, speculation=fixed, forced=acceptance),
            ADAPTIVE: open_llm(pair, max_num_seqs=max_num_seqs, forced=acceptance),
        }

    def run(self, mode: str, prompts: list[Prompt], load: int, max_tokens: int) -> Block:
        """Runs one turn of one mode."""
        token_ids = [prompt.token_ids for prompt in prompts]
        return run_block(self.llms[mode], token_ids, load, max_tokens, mode != PLAIN)

    def decisions(self) -> dict[str, int]:
        """Counts of the policy's decisions so far."""
        return self.llms[ADAPTIVE].engine.stats().policy.decisions


class Applications:
    """Two applications, fixed and adaptive; plain requests go to the adaptive one."""

    def __init__(self, apps: dict[str, App], client: LoadClient) -> None:
        self._apps, self._client = apps, client

    def run(self, mode: str, prompts: list[Prompt], load: int, max_tokens: int) -> Block:
        """Runs one turn of one mode; the first requests have staggered lengths, as in `run_block`."""
        url = self._apps[FIXED if mode == FIXED else ADAPTIVE].url
        model, bodies = self._client.model_name(url), []
        for place, prompt in enumerate(prompts):
            length = max(max_tokens * (place + 1) // load, 1) if place < load else max_tokens
            bodies.append(request_body(model, prompt, length, mode != PLAIN))
        block = self._client.run_block(url, bodies, load)
        return Block(block.tokens_per_s, summed(block.traces))

    def decisions(self) -> dict[str, int]:
        """As `Engines.decisions`."""
        return self._apps[ADAPTIVE].stats()["policy"]["decisions"]


@contextlib.contextmanager
def opened(args: argparse.Namespace, pair: Pair, max_num_seqs: int) -> Iterator[Engines | Applications]:
    """Opens the engines or applications to measure, until the block ends."""
    if not args.http:
        yield Engines(pair, max_num_seqs, args.forced_acceptance)
        return
    settings: dict[str, Any] = {"model": pair.model, "drafter": str(pair.drafter), "served_model_name": "benchmark"}
    settings |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": max_num_seqs, "enable_prefix_caching": False}
    if args.forced_acceptance is not None:
        settings["forced_acceptance"] = args.forced_acceptance
    if args.threads is not None:
        settings["threads"] = args.threads
    fixed = {"adaptive": False, "draft_steps": FIXED_STEPS, "draft_top_k": 1, "verify_tree_size": FIXED_STEPS + 1}
    configs = {ADAPTIVE: AppConfig(**settings), FIXED: AppConfig(**settings, **fixed)}
    with wingbeat_apps(configs) as apps, LoadClient() as client:
        yield Applications(apps, client)


def run_block(llm: LLM, prompts: list[list[int]], concurrency: int, max_tokens: int, speculation: bool) -> Block:
    """Runs requests that cycle through the prompts, `concurrency` at a time.

    The clock starts when all of them run, and stops while all still run, after as many further requests as there are
    prompts: reading prompts takes much of the time, and modes that read different numbers of prompts could not be
    compared. The first requests have staggered lengths, because plain decoding would otherwise read all prompts at
    once.
    """
    engine = llm.engine
    waiting = enumerate(itertools.cycle(prompts))
    running: set[str] = set()
    latest = 0

    def add(length: int) -> None:
        nonlocal latest
        latest, prompt = next(waiting)
        running.add(str(latest))
        engine.add_request(Request(str(latest), tuple(prompt), greedy(length, speculation)))

    for place in range(concurrency):
        add(max(max_tokens * (place + 1) // concurrency, 1))
    starting = set(running)
    first = latest
    num_tokens, total, started = 0, SpeculationMetrics(), 0.0
    while latest < first + len(prompts):
        if starting:
            first, num_tokens, total, started = latest, 0, SpeculationMetrics(), time.perf_counter()
        for output in engine.step():
            starting.discard(output.request_id)
            num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                running.remove(output.request_id)
                total.add(output.metrics)
                add(max_tokens)
    elapsed_s = time.perf_counter() - started
    for request_id in running:
        engine.abort_request(request_id)
    return Block(num_tokens / elapsed_s, total)


def measure(
    engines: Engines | Applications, prompts: list[Prompt], loads: tuple[int, ...], repeats: int, max_tokens: int
) -> dict[int, dict[str, list[Block]]]:
    """Blocks by load and mode; the first block of each is a warm-up and not counted."""
    results: dict[int, dict[str, list[Block]]] = {}
    for load in loads:
        blocks: dict[str, list[Block]] = {mode: [] for mode in MODES}
        num_prompts = min(max(PROMPTS_PER_REQUEST * load, LEAST_PROMPTS), MOST_PROMPTS)
        chosen = list(itertools.islice(itertools.cycle(prompts), num_prompts))
        for turn in range(repeats + 1):
            chosen = chosen[TURN:] + chosen[:TURN]
            for mode in MODES if turn % 2 else reversed(MODES):
                block = engines.run(mode, chosen, load, max_tokens)
                if turn:
                    blocks[mode].append(block)
        results[load] = blocks
    return results


def rate(blocks: list[Block]) -> float:
    """Median tokens per second."""
    return middle([block.tokens_per_s for block in blocks])


def over(blocks: dict[str, list[Block]], mode: str, other: str) -> float:
    """Median over the turns of one mode's token rate divided by another's."""
    pairs = zip(blocks[mode], blocks[other], strict=True)
    return middle([block.tokens_per_s / beside.tokens_per_s for block, beside in pairs])


def table(results: dict[int, dict[str, list[Block]]]) -> Table:
    """Table with one row per load."""
    rows = []
    for load, blocks in results.items():
        speculation = blocks[ADAPTIVE][-1].speculation
        nodes = speculation.num_draft_tokens / speculation.num_drafts if speculation.num_drafts else 0.0
        rows.append(
            (
                str(load),
                *(spread([block.tokens_per_s for block in blocks[mode]], 0) for mode in (PLAIN, FIXED, ADAPTIVE)),
                f"{over(blocks, FIXED, PLAIN):.2f}",
                f"{over(blocks, ADAPTIVE, PLAIN):.2f}",
                f"{min(over(blocks, ADAPTIVE, other) for other in (PLAIN, FIXED)):.2f}",
                f"{speculation.acceptance_length:.2f}",
                f"{nodes:.1f}",
            )
        )
    columns = (
        "concurrency",
        "plain tok/s",
        f"chain of {FIXED_STEPS} tok/s",
        "adaptive tok/s",
        "chain / plain",
        "adaptive / plain",
        "adaptive / better",
        "acceptance length",
        "nodes per tree",
    )
    note = "The last two columns are of adaptive decoding, over the rounds that verified a tree."
    return Table("Tokens per second by load: median (range)", columns, rows, note)


def plot(results: dict[int, dict[str, list[Block]]], path: Path) -> None:
    """Plots token rates relative to plain decoding, by load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    loads = list(results)
    for mode, style in ((PLAIN, "--"), (FIXED, "o-"), (ADAPTIVE, "s-")):
        ratios = [over(blocks, mode, PLAIN) for blocks in results.values()]
        axes.plot(loads, ratios, style, label=mode if mode != FIXED else f"chain of {FIXED_STEPS}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second / plain decoding")
    save_picture(figure, path)


def figures(results: dict[int, dict[str, list[Block]]]) -> list[dict[str, Any]]:
    """Measurements for the JSON file."""
    return [
        {
            "concurrency": load,
            "mode": mode,
            "tokens_per_s": [round(block.tokens_per_s, 2) for block in series],
            "over_plain": round(over(blocks, mode, PLAIN), 4),
            "speculative_decoding": series[-1].speculation.as_dict(),
        }
        for load, blocks in results.items()
        for mode, series in blocks.items()
    ]


def run(args: argparse.Namespace) -> Report:
    """Measures every load."""
    pair = chosen_pair(args)
    loads = (1, 3) if args.quick else tuple(args.concurrency)
    repeats, max_tokens = (1, 8) if args.quick else (args.repeats, args.max_tokens)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, 4 if args.quick else 64)
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; greedy, {max_tokens} tokens each, medians of {repeats}"
    facts["way"] = "over HTTP, drafters in processes of their own" if args.http else "in one process"
    if args.forced_acceptance is not None:
        facts["acceptance"] = f"forced to {', '.join(map(str, args.forced_acceptance))}"
        os.environ[BENCHMARK_VARIABLE] = "1"
    with opened(args, pair, max(loads)) as engines:
        results = measure(engines, prompts, loads, repeats, max_tokens)
        decisions = engines.decisions()
    facts["decisions"] = ", ".join(f"{reason}: {count} rounds" for reason, count in sorted(decisions.items()))
    if args.plot is not None:
        plot(results, args.plot)
    return Report("Load sweep", facts, [table(results)], {"series": figures(results), "decisions": decisions})


def main() -> None:
    """Measures, prints, plots and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--http", action="store_true", help="measure applications over HTTP")
    parser.add_argument("--threads", type=int, help="threads of each process with --http; default: the application's")
    parser.add_argument(
        "--forced-acceptance", type=float, nargs="+", metavar="RATE", help="acceptance rate of each draft level"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="PNG file for the plot; default: no plot")
    args = parser.parse_args()
    quiet()
    report = run(args)
    report.finish(args, "load_sweep")


if __name__ == "__main__":
    main()
