"""Rising and falling load on an application of 0 to a few replicas: failed requests, and times to scale.

    .venv/bin/python benchmarks/scaling.py [--drafter none] [--steps 1 12 1] [--step-s 60]

One application on a Ray of its own, scaled to zero before the first step and after the last one. Clients repeat the
same few requests, so that every answer can be compared with the first answer to its request. The states of the replicas
are those that Serve reports.
"""

import argparse
import asyncio
import itertools
import math
import time
from typing import Any, NamedTuple

from local_engine import add_model_options, chosen_pair, quiet
from ray import serve
from report import RESULTS, Report, Table, machine_facts, middle, model_facts
from servers import App, wingbeat_apps
from steady_load import Answer, Comparison, SteadyLoad, compare
from workload import held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.tokenizer import Tokenizer

NAME = "scaling"
POLL_S = 0.2
NUM_BODIES = 8


class Sight(NamedTuple):
    """Number of replicas by state at one time."""

    at_s: float
    running: int
    starting: int
    stopping: int


class Watch:
    """Polls the states of the replicas."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []

    async def run(self) -> None:
        """Polls forever."""
        while True:
            self.sights.append(await asyncio.to_thread(look))
            await asyncio.sleep(POLL_S)

    async def until(self, running: int, timeout_s: float) -> float:
        """Seconds until exactly `running` replicas run and none starts or stops; NaN after the timeout."""
        started = time.perf_counter()
        while time.perf_counter() - started < timeout_s:
            await asyncio.sleep(POLL_S)
            sight = self.sights[-1] if self.sights else None
            if sight is not None and sight[1:] == (running, 0, 0):
                return time.perf_counter() - started
        return float("nan")

    def first(self, since_s: float, running: int) -> float:
        """Seconds from `since_s` until at least `running` replicas run."""
        return next((s.at_s - since_s for s in self.sights if s.at_s >= since_s and s.running >= running), float("nan"))

    def most(self, since_s: float) -> int:
        """Maximum number of running replicas at once since `since_s`."""
        return max((sight.running for sight in self.sights if sight.at_s >= since_s), default=0)


def look() -> Sight:
    """Reads the states of the replicas from Serve."""
    states = serve.status().applications[NAME].deployments["Verifier"].replica_states
    counts = {str(getattr(state, "value", state)): number for state, number in states.items()}
    starting = counts.get("STARTING", 0) + counts.get("PENDING_ALLOCATION", 0)
    return Sight(time.perf_counter(), counts.get("RUNNING", 0), starting, counts.get("STOPPING", 0))


class Step(NamedTuple):
    """Results of a step with a constant number of clients."""

    num_clients: int
    seconds: float
    most_running: int
    first_more_s: float
    """Seconds from the step's beginning until an additional replica runs; NaN if none does."""
    num_requests: int
    longest_s: float
    first_token_s: list[float]
    """Seconds to the first token of every request."""
    failures: list[str]
    differences: list[str]


async def run_step(
    app: App,
    bodies: list[dict[str, Any]],
    watch: Watch,
    answers: dict[int, Answer],
    num: int,
    rises: bool,
    seconds: float,
    patience_s: float,
) -> Step:
    """Runs one step of load; a rising step lasts until it has brought another replica, and half a step longer."""
    load, began, before = SteadyLoad(app.url, bodies, num), time.perf_counter(), watch.sights[-1].running
    running = asyncio.create_task(load.run())
    await asyncio.sleep(seconds)
    while rises and math.isnan(watch.first(began, before + 1)) and time.perf_counter() - began < patience_s:
        await asyncio.sleep(POLL_S)
    if rises:
        await asyncio.sleep(seconds / 2)
    load.stop()
    await running
    for trace in load.traces:
        if trace.answer is not None:
            answers.setdefault(trace.number, trace.answer)
    compared: Comparison = compare(load.traces, answers)
    longest_s = max(trace.ended_s - trace.started_s for trace in load.traces)
    waits = [min(times[0] for times in t.arrivals.values()) - t.started_s for t in load.traces if t.arrivals]
    first_more_s, most = watch.first(began, before + 1), watch.most(began)
    counts = (most, first_more_s, compared.num_requests, longest_s, waits)
    return Step(num, time.perf_counter() - began, *counts, *compared[1:])


async def measure(app: App, bodies: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Waits for zero replicas, runs the steps, and waits for zero replicas again."""
    watch, answers, steps = Watch(), {}, []
    watching = asyncio.create_task(watch.run())
    to_zero = [await watch.until(0, args.patience_s)]
    for before, num_clients in itertools.pairwise([0, *args.steps]):
        rises, length = num_clients > before, (args.step_s, args.patience_s)
        steps.append(await run_step(app, bodies, watch, answers, num_clients, rises, *length))
        print(f"{num_clients} clients: {steps[-1]._replace(first_token_s=[])}", flush=True)
    to_zero.append(await watch.until(0, args.patience_s))
    watching.cancel()
    return {"steps": steps, "to_zero_s": to_zero, "sights": watch.sights, "drains_s": drains(watch.sights)}


def drains(sights: list[Sight]) -> list[float]:
    """Durations in seconds during which replicas were being stopped."""
    found, since = [], None
    for sight in sights:
        if sight.stopping and since is None:
            since = sight.at_s
        elif not sight.stopping and since is not None:
            found.append(sight.at_s - since)
            since = None
    return found


def bodies_of(args: argparse.Namespace, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Streaming request bodies, alternately greedy and sampled."""
    prompts = held_out_prompts(tokenizer, args.corpus, NUM_BODIES)
    shared = {"max_tokens": args.max_tokens, "ignore_eos": True, "stream": True, "n": 1}
    return [
        {"prompt": prompt.text, "temperature": float(number % 2), "seed": number, **shared}
        for number, prompt in enumerate(prompts)
    ]


def table(figures: dict[str, Any]) -> Table:
    """Table with one row per step."""
    rows = [
        (
            f"{step.num_clients}",
            f"{step.num_requests}",
            f"{len(step.failures)}",
            f"{len(step.differences)}",
            f"{step.most_running}",
            f"{step.first_more_s:.1f}",
            f"{step.longest_s:.1f}",
            f"{middle(step.first_token_s):.2f}",
            f"{max(step.first_token_s):.1f}",
        )
        for step in figures["steps"]
    ]
    columns = "clients", "requests", "failed", "other text", "replicas", "first new one after s", "longest request s"
    columns += "first token s", "longest"
    drained, (_, last) = figures["drains_s"], figures["to_zero_s"]
    drain = f"A replica drains in {middle(drained):.1f} s (median of {len(drained)})"
    note = f"{drain}; 0 replicas {last:.0f} s after the end."
    return Table("Load up and down", columns, rows, note)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 12, 1], help="number of clients in each step")
    parser.add_argument("--step-s", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-replicas", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--target-queue-s", type=float, default=1.0)
    parser.add_argument("--downscale-delay-s", type=float, default=10.0)
    parser.add_argument(
        "--engine-factory", help="module:function that makes engines which start quickly, for busy machines"
    )
    parser.add_argument("--patience-s", type=float, default=120.0, help="seconds to wait for all replicas to end")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.step_s = [1, 6], 15.0
    quiet()
    pair = chosen_pair(args)
    config = AppConfig(
        model=pair.model,
        drafter=str(pair.drafter),
        max_model_len=512,
        max_num_seqs=args.max_num_seqs,
        engine_wait_s=300.0,
        engine_factory=args.engine_factory,
        autoscaling_config={
            "min_replicas": 0,
            "max_replicas": args.max_replicas,
            "downscale_delay_s": args.downscale_delay_s,
            "policy": {"policy_kwargs": {"target_queue_s": args.target_queue_s}},
        },
    )
    bodies = bodies_of(args, Tokenizer.load(pair.model))
    with wingbeat_apps({NAME: config}) as apps:
        figures = asyncio.run(measure(apps[NAME], bodies, args))
    workload = (
        f"steps of {args.step_s:g} s, streams of {args.max_tokens} tokens, half of them sampled; 0 to "
        f"{args.max_replicas} replicas of {args.max_num_seqs} slots, target_queue_s {args.target_queue_s:g}, "
        f"downscale_delay_s {args.downscale_delay_s:g}"
    )
    facts = {**machine_facts(), **model_facts(*pair), "workload": workload}
    facts["engine"] = args.engine_factory or "Wingbeat's own"
    report = Report("Scaling on Ray Serve", facts, [table(figures)], figures)
    report.show()
    report.save(args.output or RESULTS / "scaling.json")


if __name__ == "__main__":
    main()
