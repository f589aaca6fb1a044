"""Two replicas under steady load whose drafters, engines and replicas are killed: failures that clients notice.

    .venv/bin/python benchmarks/chaos.py [--drafter-kills 200] [--engine-kills 20] [--verifier-kills 20]

`longest_silence_s` is the longest pause of a stream when the drafter of its engine, which ran 64 streams, was killed or
stopped. Exits with 1 if a request failed, a text differs from the undisturbed one, KV blocks do not add up, or a
channel's file is left over.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, NamedTuple

import ray
from engine_watch import FULL_SHARE, EngineWatch, acceptance
from killer import HUNG, KILLED, KINDS, Kill, Killer, NoVictim, Recovery, longest_wait_s, met, recoveries, schedule
from local_engine import add_model_options, chosen_pair, quiet
from report import Report, Table, machine_facts, middle, model_facts
from servers import App, wingbeat_apps
from steady_load import Answer, Comparison, SteadyLoad, compare, mixed_bodies
from workload import Prompt, describe, held_out_prompts

from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.runtime.tokenizer import Tokenizer

MODEL_NAME = "benchmark"
NUM_REPLICAS = 2
CONCURRENCY = 16
"""Choices in flight: more than both engines can run, so that some always wait."""
LIMITS = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256, "num_kv_blocks": 400}
"""Engine limits. Few enough KV blocks that cached prefixes are evicted, so that prompts are recomputed all the time."""
NUM_PROMPTS = 24
NUM_CONTROLS = 50
MUST_BE_EMPTY = ("failures", "differences", "errors")


class Plan(NamedTuple):
    """Parameters of the disturbance of an application."""

    num_replicas: int
    budget_s: float
    seed: int
    concurrency: int = CONCURRENCY


@dataclass
class Run:
    """Results of one disturbed application."""

    load: SteadyLoad
    undisturbed_acceptance: float = 0.0
    undisturbed_pauses_s: list[float] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    comparison: Comparison = field(default_factory=lambda: Comparison(0, [], []))
    errors: list[str] = field(default_factory=list)
    killing_s: float = 0.0
    engines: frozenset[str] = frozenset()
    """Ids of all engines that ever answered."""

    def of_kind(self, kind: str) -> list[Recovery]:
        """Returns the recoveries from the kills of one kind."""
        return [one for kill, one in zip(self.kills, self.recoveries, strict=True) if kill.kind == kind]

    @property
    def longest_silence_s(self) -> float | None:
        """Longest pause of a stream in flight after a kill, in seconds; None if no stream was in flight at any kill."""
        return max((one.pause_s for one in self.recoveries if one.pause_s is not None), default=None)

    def figures(self) -> dict[str, Any]:
        """Measurements for the JSON file."""
        pairs = zip(self.kills, self.recoveries, strict=True)
        return {
            "num_requests": self.comparison.num_requests,
            "failures": self.comparison.failures,
            "differences": self.comparison.differences,
            "errors": self.errors,
            "killing_s": self.killing_s,
            "longest_silence_s": self.longest_silence_s,
            "undisturbed_acceptance": self.undisturbed_acceptance,
            "undisturbed_pauses_s": self.undisturbed_pauses_s,
            "met": met(self.kills, self.load),
            "kills": [{"kind": kill.kind, "engine": kill.engine_id, **one._asdict()} for kill, one in pairs],
        }


def request_bodies(prompts: list[Prompt], tokens: int) -> list[dict[str, Any]]:
    """Request bodies with short and with long prompts."""
    texts = [prompt.text for prompt in prompts]
    texts += ["".join(texts[first : first + 4]) for first in range(0, len(texts) - 3, 4)]
    return mixed_bodies(texts, tokens, MODEL_NAME)


async def known_answers(
    app: App, bodies: list[dict[str, Any]], watch: EngineWatch, run: Run, concurrency: int
) -> dict[int, Answer]:
    """Sends every body twice, undisturbed; records acceptance and the streams' normal pauses.

    Raises:
        SystemExit: a request failed, or its two answers differ, so that the answer cannot reveal a failure later.
    """
    load = SteadyLoad(app.url, bodies, concurrency)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        while len([trace for trace in load.traces if trace.ended_s is not None]) < 2 * len(bodies):
            await asyncio.sleep(0.1)
        load.stop()
        ended = time.perf_counter()
    answers = {trace.number: trace.answer for trace in load.traces if trace.failure is None}
    comparison = compare(load.traces, answers)
    if comparison.failures or comparison.differences:
        raise SystemExit(f"undisturbed already: {(comparison.failures + comparison.differences)[:5]}")
    spans = [[one for one in samples if started <= one.at_s <= ended] for samples in watch.samples.values()]
    rates = [acceptance(span[0], span[-1], span[1:-1]) for span in spans if len(span) > 1]
    run.undisturbed_acceptance = sum(rates) / len(rates)
    instants = [started + (ended - started) * (index + 1) / (NUM_CONTROLS + 1) for index in range(NUM_CONTROLS)]
    run.undisturbed_pauses_s = [wait for at_s in instants if (wait := longest_wait_s(load, at_s)) is not None]
    return answers


async def disturb(app: App, bodies: list[dict[str, Any]], kinds: list[str], plan: Plan) -> Run:
    """Records the undisturbed answers, kills processes, and compares all later answers with the recorded ones."""
    watch, load = EngineWatch(app.name), SteadyLoad(app.url, bodies, plan.concurrency)
    run = Run(load)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        while len(watch.latest()) < plan.num_replicas:
            await asyncio.sleep(0.1)
        answers = await known_answers(app, bodies, watch, run, plan.concurrency)
        killer = Killer(watch, load, random.Random(plan.seed), run.undisturbed_acceptance, plan.num_replicas)
        loading = tasks.create_task(load.run())
        started = time.perf_counter()
        try:
            await killer.run(kinds, plan.budget_s)
        except NoVictim as error:
            run.errors.append(str(error))
        run.killing_s = time.perf_counter() - started
        load.stop()
        await loading
        try:
            await watch.check_integrity()
        except ray.exceptions.RayError as error:
            run.errors.append(f"KV blocks: {root_cause(error)}")
        watching.cancel()
    run.kills = killer.kills
    run.recoveries = recoveries(killer.kills, watch.samples, load, run.undisturbed_acceptance)
    run.comparison = compare(load.traces, answers)
    run.engines = frozenset(watch.samples)
    return run


def disturbed(config: AppConfig, bodies: list[dict[str, Any]], kinds: list[str], plan: Plan) -> Run:
    """Starts an application, disturbs it and shuts it down."""
    with wingbeat_apps({"app": config}) as apps:
        run = asyncio.run(disturb(apps["app"], bodies, kinds, plan))
    names = {path.name.removeprefix(PREFIX).split(".")[0] for path in SHM_DIR.glob(f"{PREFIX}*")}
    run.errors += [f"{SHM_DIR}/{PREFIX}{name}.* is left over" for name in sorted(names & run.engines)]
    return run


def seconds(values: Sequence[float | None]) -> str:
    """Formats median, 95th percentile and maximum of the known values, in seconds."""
    seen = sorted(value for value in values if value is not None)
    if not seen:
        return "-"
    high = quantiles(seen, n=20, method="inclusive")[-1] if len(seen) > 1 else seen[0]
    return f"{middle(seen):.2f} / {high:.2f} / {seen[-1]:.2f}"


def cost_table(run: Run) -> Table:
    """Table of the consequences of each kind of failure."""
    rows = [("none", f"{len(run.undisturbed_pauses_s)}", seconds(run.undisturbed_pauses_s), "-", "-", "-", "-")]
    for kind in KINDS:
        done = run.of_kind(kind)
        columns = [[getattr(one, name) for one in done] for name in Recovery._fields]
        rows.append((kind, f"{len(done)}", *(seconds(column) for column in columns)))
    columns = ("event", "times", "pause", "noticed after", "engine is back", "drafter is back", "full acceptance")
    note = (
        "Seconds from the kill: median / 95th percentile / maximum. Pause: without a token, of the stream under way "
        f"that waited longest. Full acceptance: a second of at least {FULL_SHARE:.0%} of the undisturbed acceptance "
        "begins. Drafters are replaced without the pauses that follow a series of failures."
    )
    return Table("What a failure costs", columns, rows, note)


def crowd_table(run: Run, num_streams: int) -> Table:
    """Table of pauses of streams that share an engine whose drafter fails."""
    rows = [("none", f"{len(run.undisturbed_pauses_s)}", seconds(run.undisturbed_pauses_s), "-", "-")]
    for kind in (KILLED, HUNG):
        done = run.of_kind(kind)
        columns = [[getattr(one, name) for one in done] for name in ("pause_s", "noticed_s", "attached_s")]
        rows.append((kind, f"{len(done)}", *(seconds(column) for column in columns)))
    columns = ("event", "times", "silence", "noticed after", "drafter is back")
    note = "Seconds from the event: median / 95th percentile / maximum. Silence: of the stream that waited longest."
    return Table(f"A drafter that ends under {num_streams} streams of one engine", columns, rows, note)


def crowd(args: argparse.Namespace, bodies: list[dict[str, Any]], settings: dict[str, Any]) -> Run:
    """Runs as many streams as one engine can, all drafting, and kills and stops the engine's drafters."""
    number = args.streams
    limits = {"max_num_seqs": number, "num_kv_blocks": number * LIMITS["num_kv_blocks"] // LIMITS["max_num_seqs"]}
    streamed = [body | {"stream": True, "n": 1} for body in bodies]
    bodies = [streamed[index % len(streamed)] | {"seed": index} for index in range(max(number, len(streamed)))]
    kinds = [KILLED, HUNG] * args.stream_kills
    config = AppConfig(num_replicas=1, drafter_back_off_s=0, **settings | limits)
    return disturbed(config, bodies, kinds, Plan(1, args.budget_s, args.seed, number))


def run(args: argparse.Namespace) -> Report:
    """Disturbs an application of two replicas, and then one engine with many streams."""
    pair = chosen_pair(args)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, 4 if args.quick else NUM_PROMPTS)
    bodies = request_bodies(prompts, args.max_tokens)
    settings = {"model": pair.model, "drafter": str(pair.drafter), "adaptive": False, **LIMITS}
    settings["served_model_name"] = MODEL_NAME
    hurried = AppConfig(num_replicas=NUM_REPLICAS, drafter_back_off_s=0, **settings)
    kinds = schedule(args.drafter_kills, args.engine_kills, args.verifier_kills, random.Random(args.seed))
    runs: dict[str, Run] = {}
    tables = []
    if kinds:
        runs["kills"] = disturbed(hurried, bodies, kinds, Plan(NUM_REPLICAS, args.budget_s, args.seed))
        tables.append(cost_table(runs["kills"]))
    if args.stream_kills:
        runs["crowd"] = crowd(args, bodies, settings)
        tables.append(crowd_table(runs["crowd"], args.streams))
    facts = {**machine_facts(), **model_facts(*pair)}
    if args.stream_kills:
        facts["longest_silence_s"] = f"{runs['crowd'].longest_silence_s:.2f} under {args.streams} streams of one engine"
    facts["workload"] = (
        f"{CONCURRENCY} clients; {describe(prompts)}, and joined ones; {args.max_tokens // 2} to "
        f"{3 * args.max_tokens // 2} tokens; streamed or not, greedy or sampled, 1 to 4 choices"
    )
    facts["server"] = f"{NUM_REPLICAS} replicas of {LIMITS}, full chains in every round"
    for name, one in runs.items():
        facts[f"kills, {name}"] = f"{len(one.kills)} in {one.killing_s:.0f} s; under way at them: {met_facts(one)}"
        facts[f"outcome, {name}"] = (
            f"{one.comparison.num_requests} requests, {len(one.comparison.failures)} failed, "
            f"{len(one.comparison.differences)} with another text; {'; '.join(one.errors) or 'no other error'}"
        )
    return Report("Failures under load", facts, tables, {name: one.figures() for name, one in runs.items()})


def met_facts(run: Run) -> str:
    """Describes the requests in flight at the kills."""
    counts = met(run.kills, run.load)
    return ", ".join(f"{counts[name] / max(1, len(run.kills)):.1f} in {name}" for name in sorted(counts))


def failed(figures: dict[str, Any]) -> list[str]:
    """Collects all failures, differences and errors of a report."""
    return [one for run in figures.values() for name in MUST_BE_EMPTY for one in run[name]]


def main() -> None:
    """Kills processes, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument(
        "--drafter-kills",
        type=int,
        help="drafters to kill (default: 200); a fifth of them are stopped instead of killed",
    )
    parser.add_argument(
        "--engine-kills", type=int, help="engine processes to kill, whose replicas stay alive (default: 20)"
    )
    parser.add_argument("--verifier-kills", type=int, help="replicas to kill, with their engines (default: 20)")
    parser.add_argument(
        "--streams", type=int, default=64, help="concurrent streams of the engine whose drafters are killed and stopped"
    )
    parser.add_argument(
        "--stream-kills", type=int, help="kills, and stops, of that engine's drafters (default: 8 of each)"
    )
    parser.add_argument("--budget-s", type=float, default=1500.0, help="seconds after which no further kill begins")
    parser.add_argument("--max-tokens", type=int, help="average tokens per choice (default: 160)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the order and times of kills")
    args = parser.parse_args()
    defaults = {
        "drafter_kills": (200, 4),
        "engine_kills": (20, 1),
        "verifier_kills": (20, 1),
        "stream_kills": (8, 1),
    }
    for name, (full, quick_one) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, quick_one if args.quick else full)
    args.max_tokens = args.max_tokens or (64 if args.quick else 160)
    quiet()
    report = run(args)
    report.finish(args, "chaos")
    if wrong := failed(report.figures):
        print("\n".join(wrong[:20]), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
