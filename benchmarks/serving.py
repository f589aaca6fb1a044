"""Wingbeat over HTTP: speculative and plain requests in turn, under rising load, and a breakdown of round times.

    .venv/bin/python benchmarks/serving.py [--in-engine] [--one-thread] [--proxy] [--plain-app] [--overhead]
                                             [--fixed] [--url URL] [--other NAME=DRAFTER]

Starts the application itself, unless a URL is given (of a server with enable_prefix_caching=false). Blocks of plain and
of speculative requests alternate, so that a drift of the machine affects both alike; figures are medians over the
repeats. `--proxy` also sends the same requests through Serve's proxy; `--plain-app` adds an application without a
drafter as the baseline, `--other` one with another drafter, `--in-engine` one whose drafter runs in the engine's
process, `--one-thread` one whose verifier and drafter have a thread each; their blocks take turns with the others'.
`--overhead` compares a round with the same engine in this process.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from http_load import Block, LoadClient, Trace
from local_engine import (
    MAX_MODEL_LEN,
    Pair,
    add_model_options,
    add_other_drafters,
    chosen_pair,
    open_llm,
    other_drafters,
    quiet,
)
from report import Report, Table, machine_facts, middle, model_facts, spread
from round_times import (
    Overhead,
    RoundTimes,
    between,
    measure_hop_s,
    measure_overhead,
    overhead_table,
    round_table,
)
from servers import App, wingbeat_apps
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.tokenizer import Tokenizer

PLAIN, SPECULATIVE, PLAIN_APP = "plain", "speculative", "plain, no drafter"
OTHER, IN_ENGINE = "speculative-{}", "speculative, drafter in the engine"
ONE_THREAD = "{}, one thread"
PROXIED = "{}, by Serve's proxy"
WAVES = 8
"""Requests per client and block. At the end of a block some clients have nothing left to send, for a longer share of
the block the fewer requests each has, because speculative requests differ in length."""
SILENCE_MS = 1e6
"""Milliseconds between messages: an answer then arrives as its first token and the rest."""


class Mode(NamedTuple):
    """A way to serve the requests."""

    name: str
    url: str
    speculation: bool
    app: App | None
    """Application whose engine reports round times; None if only a URL is known."""


class Load(NamedTuple):
    """Concurrency and size of the blocks."""

    concurrency: int
    num_requests: int
    """Requests per block."""


@dataclass
class Series:
    """Repeats of one mode under one load."""

    mode: str
    concurrency: int
    blocks: list[Block] = field(default_factory=list)
    times: list[RoundTimes] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Median over the blocks."""
        return middle([block.tokens_per_s for block in self.blocks])

    @property
    def metrics(self) -> SpeculationMetrics:
        """Sum over all requests."""
        return summed(trace for block in self.blocks for trace in block.traces)

    def medians_ms(self, name: str) -> float:
        """Median over the blocks of each block's median `ttft_s` or `tpot_s`, in ms."""
        return 1e3 * middle([middle([getattr(trace, name) for trace in block.traces]) for block in self.blocks])

    def middle_times(self) -> RoundTimes:
        """Round times of the block with the median time per round."""
        return sorted(self.times, key=lambda one: one.round_ms)[len(self.times) // 2]

    def figures(self) -> dict[str, Any]:
        """Measurements for the JSON file."""
        return {
            "mode": self.mode,
            "concurrency": self.concurrency,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_of_repeats": [block.tokens_per_s for block in self.blocks],
            "ttft_ms": self.medians_ms("ttft_s"),
            "tpot_ms": self.medians_ms("tpot_s"),
            "speculative_decoding": self.metrics.as_dict(),
            "round": self.middle_times()._asdict() if self.times else None,
        }


def summed(traces: Iterable[Trace]) -> SpeculationMetrics:
    """Sums the drafted and accepted tokens of some requests."""
    total = SpeculationMetrics()
    for trace in traces:
        if trace.speculation is not None:
            counts = {name: trace.speculation[name] for name in vars(total) if name in trace.speculation}
            total.add(SpeculationMetrics(**counts))
    return total


def request_body(model: str, prompt: Prompt, max_tokens: int, speculation: bool = True) -> dict[str, Any]:
    """Request body of a greedy completion of exactly `max_tokens` tokens."""
    return {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": speculation},
    }


def measure(
    client: LoadClient,
    modes: list[Mode],
    load: Load,
    prompts: list[Prompt],
    max_tokens: int,
    repeats: int,
    hop_s: float,
) -> list[Series]:
    """Runs all modes in turn, `repeats` times; the first block of each is a warm-up and not counted."""
    done = [Series(mode.name, load.concurrency) for mode in modes]
    chosen = [prompts[index % len(prompts)] for index in range(load.num_requests)]
    for repeat in range(repeats + 1):
        for mode, series in zip(modes, done, strict=True):
            model = client.model_name(mode.url)
            bodies = [request_body(model, prompt, max_tokens, mode.speculation) for prompt in chosen]
            before = mode.app.stats() if mode.app else None
            block = client.run_block(mode.url, bodies, load.concurrency)
            if repeat == 0:
                continue
            series.blocks.append(block)
            if mode.app:
                hop_of_mode = hop_s if mode.speculation and mode.name != IN_ENGINE else 0.0
                after = mode.app.stats()
                series.times.append(between(before["phases"], after["phases"], block.elapsed_s, hop_of_mode))
    return done


def serving_table(done: list[Series], repeats: int) -> Table:
    """Table with one row per load and mode; ratios are to the plain row of the same load."""
    rows = []
    for series in done:
        base = next(one for one in done if one.concurrency == series.concurrency and one.mode == PLAIN)
        metrics = series.metrics
        rows.append(
            (
                f"{series.concurrency}",
                series.mode,
                spread([block.tokens_per_s for block in series.blocks]),
                f"{series.medians_ms('ttft_s'):.1f}",
                f"{series.medians_ms('tpot_s'):.2f}",
                f"{metrics.acceptance_length:.2f}" if metrics.num_drafts else "-",
                f"{series.tokens_per_s / base.tokens_per_s:.2f}",
            )
        )
    columns = ("concurrency", "decoding", "tokens/s", "TTFT ms", "TPOT ms", "acceptance length", "ratio to plain")
    return Table("Serving over HTTP", columns, rows, f"Medians of {repeats} repeats, tokens/s with their range.")


def same_texts(done: list[Series]) -> str:
    """Number of requests that had the same text in every mode and repeat of their load."""
    same = total = 0
    for concurrency in {series.concurrency for series in done}:
        blocks = [block for series in done if series.concurrency == concurrency for block in series.blocks]
        texts = zip(*([trace.text for trace in block.traces] for block in blocks), strict=True)
        equal = [len(set(versions)) == 1 for versions in texts]
        same, total = same + sum(equal), total + len(equal)
    return f"{same} of {total} requests"


def app_configs(pair: Pair, args: argparse.Namespace) -> dict[str, AppConfig]:
    """Configurations to measure: the application, and the variants that the options add."""
    settings = {
        "model": pair.model,
        "served_model_name": "benchmark",
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
        "adaptive": not args.fixed,
    }
    if args.threads is not None:
        settings["threads"] = args.threads
    drafters = {SPECULATIVE: str(pair.drafter)} | {
        OTHER.format(name): other for name, other in other_drafters(args).items()
    }
    configs = {name: AppConfig(drafter=drafter, **settings) for name, drafter in drafters.items()}
    if args.in_engine:
        configs[IN_ENGINE] = AppConfig(drafter=str(pair.drafter), drafter_place="engine", **settings)
    if args.one_thread:
        one_thread = settings | {"threads": 1}
        configs[ONE_THREAD.format(SPECULATIVE)] = AppConfig(drafter=str(pair.drafter), **one_thread)
    if args.plain_app:
        configs[PLAIN] = AppConfig(drafter="none", **settings)
    return configs


def modes_of(apps: dict[str, App], proxied: bool) -> list[Mode]:
    """Ways to send requests to the applications.

    Plain and speculative requests go to the main application, speculative ones to its variants, and plain ones to the
    application without a drafter.
    """
    app = apps[SPECULATIVE]
    modes = [Mode(PLAIN, app.url, False, app)]
    modes += [Mode(name, one.url, True, one) for name, one in apps.items() if name != PLAIN]
    one_thread = apps.get(ONE_THREAD.format(SPECULATIVE))
    if one_thread is not None:
        modes.append(Mode(ONE_THREAD.format(PLAIN), one_thread.url, False, one_thread))
    if proxied:
        modes += [mode._replace(name=PROXIED.format(mode.name), url=app.proxied_url) for mode in modes]
    if PLAIN in apps:
        modes.append(Mode(PLAIN_APP, apps[PLAIN].url, False, apps[PLAIN]))
    return modes


def run_loads(
    client: LoadClient, modes: list[Mode], args: argparse.Namespace, prompts: list[Prompt], hop_s: float
) -> tuple[list[Series], list[Table], dict[str, str]]:
    """Measures every load; returns the series, tables and facts."""
    done: list[Series] = []
    for concurrency in args.concurrency:
        load = Load(concurrency, args.requests or max(16, WAVES * concurrency))
        done += measure(client, modes, load, prompts, args.max_tokens, args.repeats, hop_s)
    tables = [serving_table(done, args.repeats)]
    timed = {f"{one.mode}, {one.concurrency}": one.middle_times() for one in done if one.times}
    if timed:
        tables.append(round_table(timed, "Where a round's time goes, by decoding and concurrency"))
    cached = sum(trace.num_cached_tokens for one in done for block in one.blocks for trace in block.traces)
    facts = {"same text in every mode and repeat": same_texts(done)}
    if cached:
        facts["warning"] = f"{cached} prompt tokens came from the prefix cache: TTFT is lower than for new prompts"
    return done, tables, facts


def overheads(pair: Pair, args: argparse.Namespace, prompts: list[Prompt]) -> list[Overhead]:
    """Measures the overhead of actors and channel, with answers in two messages and streamed round by round."""
    shape = SpeculationConfig.default("cpu", adaptive=not args.fixed)
    llm = open_llm(pair, max_num_seqs=AppConfig().most_num_seqs(), speculation=shape)
    bodies = [request_body("benchmark", prompt, args.max_tokens) for prompt in prompts]
    config = app_configs(pair, args)[SPECULATIVE]
    quiet_config = config.model_copy(update={"stream_interval_ms": SILENCE_MS})
    ways = []
    for way, how in (("in two messages", quiet_config), ("streamed round by round", config)):
        with wingbeat_apps({"app": how}) as apps, LoadClient() as client:
            ways.append(measure_overhead(way, apps["app"], client, llm, bodies, prompts))
    return ways


def run(args: argparse.Namespace) -> Report:
    """Starts the servers and measures them."""
    pair = chosen_pair(args)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, 4 if args.quick else 32)
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; greedy, {args.max_tokens} tokens each; client on the same machine"
    if args.url:
        facts["server"] = args.url
        modes = [Mode(PLAIN, args.url, False, None), Mode(SPECULATIVE, args.url, True, None)]
        with LoadClient() as client:
            done, tables, more = run_loads(client, modes, args, prompts, 0.0)
        return Report("Serving", facts | more, tables, {"series": [one.figures() for one in done]})
    hop_s = measure_hop_s()
    configs = app_configs(pair, args)
    threads = configs[SPECULATIVE].num_threads() or "as many as pay"
    facts["server"] = f"Ray Serve, threads of verifier and of drafter: {threads}; float32, no prefix cache"
    with wingbeat_apps(configs) as apps, LoadClient() as client:
        done, tables, more = run_loads(client, modes_of(apps, args.proxy), args, prompts, hop_s)
        figures = {"hop_us": 1e6 * hop_s, "series": [one.figures() for one in done]}
    if args.overhead:
        ways = overheads(pair, args, prompts)
        tables.append(overhead_table(ways))
        figures["overhead"] = [way.figures() for way in ways]
    return Report("Serving", facts | more, tables, figures)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    add_other_drafters(parser)
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--in-engine", action="store_true", help="also measure a drafter within the engine's process")
    parser.add_argument("--one-thread", action="store_true", help="also measure one thread for each process")
    parser.add_argument("--proxy", action="store_true", help="also send requests through Serve's proxy")
    parser.add_argument("--plain-app", action="store_true", help="also measure an application without a drafter")
    parser.add_argument("--overhead", action="store_true", help="also compare a round with the engine in process")
    parser.add_argument(
        "--fixed", action="store_true", help="draft full chains in every round, so that rounds are comparable"
    )
    parser.add_argument("--threads", type=int, help="threads of verifier and drafter each; default: the application's")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--requests", type=int, help=f"requests per block; default: the larger of 16 and {WAVES} times the concurrency"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.concurrency, args.requests, args.max_tokens, args.repeats = [1, 2], 2, 16, 1
    quiet()
    report = run(args)
    report.finish(args, "serving")


if __name__ == "__main__":
    main()
