"""Mixed load for a long time on an application: memory, descriptors and segments of every process, with a plot.

    .venv/bin/python benchmarks/soak.py [--minutes 30] [--plot docs/images/soak.png]

Requests are streamed or not, greedy or sampled, have one to four choices, some follow a regular expression or return
log-probabilities, and some clients disconnect early. Exits with 1 if a request failed or its text differed from an
earlier answer.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from local_engine import add_model_options, chosen_pair, quiet
from report import RESULTS, Report, Table, machine_facts, middle, model_facts
from servers import App, wingbeat_apps
from steady_load import Answer, SteadyLoad, compare, mixed_bodies
from workload import describe, held_out_prompts

from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.process_tree import descendants
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.tokenizer import Tokenizer

NAME = "soak"
SAMPLE_S = 10.0
LEAVE_EVERY_S = 2.0
KINDS = {
    f"ray::ServeReplica:{NAME}:Router": "router",
    f"ray::ServeReplica:{NAME}:Verifier": "replica",
    "ray::DrafterActor": "drafter",
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "controller",
}
MODULES = {
    "wingbeat.deployments.replica.engine.engine_process": "engine",
    "wingbeat.cluster.fork_server": "drafter",
}
WARM_SHARE = 0.25
"""Share of the time that is excluded from the comparison while caches fill."""


class Sample(NamedTuple):
    """Sum over all processes of a kind at one time."""

    at_s: float
    memory_mb: float
    """Resident memory in MB, without memory shared with other processes."""
    descriptors: int
    cpu_s: float
    """Processor time so far, in seconds."""


class Watch:
    """Samples the processes below this one every few seconds."""

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self.segments: list[int] = []

    async def run(self) -> None:
        """Samples until cancelled."""
        began = time.perf_counter()
        while True:
            self._look(time.perf_counter() - began)
            await asyncio.sleep(SAMPLE_S)

    def _look(self, at_s: float) -> None:
        found: dict[str, Counter] = defaultdict(Counter)
        for process in descendants(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (kind := _kind(process.pid)) is not None:
                    found[kind].update(_figures(process.pid))
        for kind, sums in found.items():
            self.samples[kind].append(Sample(at_s, sums["memory_mb"], sums["descriptors"], sums["cpu_s"]))
        self.segments.append(len(list(SHM_DIR.glob(f"{PREFIX}*"))))


def _kind(pid: int) -> str | None:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    ours = next((kind for module, kind in MODULES.items() if f"-m {module} " in command), None)
    return ours or next((kind for name, kind in KINDS.items() if command.startswith(name)), None)


def _figures(pid: int) -> dict[str, float]:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith(("Private_", "Swap:")))
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "memory_mb": private / 1024,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "cpu_s": sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
    }


def all_bodies(texts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Mixed request bodies, some of which follow a regular expression or return log-probabilities."""
    bodies = mixed_bodies(texts, tokens, NAME)
    for index, body in enumerate(bodies):
        if index % 8 == 1:
            body["structured_outputs"] = {"regex": r"[a-z]{2,12}( [a-z]{2,12}){3,20}\."}
            body["ignore_eos"] = False
        if index % 8 == 6:
            body["logprobs"] = 2
    return bodies


async def leave(app: App, bodies: list[dict[str, Any]]) -> None:
    """Simulates clients that disconnect after the first piece of their answer, until cancelled."""
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as http:
        for body in itertools.cycle([body for body in bodies if body["stream"]]):
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", f"{app.url}/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        break
            await asyncio.sleep(LEAVE_EVERY_S)


async def soak(app: App, bodies: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Applies load for the given time; compares every answer with the first one to the same request."""
    watch, load = Watch(), SteadyLoad(app.url, bodies, args.clients)
    began = time.perf_counter()
    background = [asyncio.create_task(watch.run()), asyncio.create_task(leave(app, bodies))]
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(60 * args.minutes)
    for task in background:
        task.cancel()
    load.stop()
    await loading
    answers: dict[int, Answer] = {}
    for trace in load.traces:
        if trace.answer is not None:
            answers.setdefault(trace.number, trace.answer)
    compared = compare(load.traces, answers)
    stats = await asyncio.to_thread(app.stats)
    return {
        "num_requests": compared.num_requests,
        "failures": compared.failures,
        "differences": compared.differences,
        "num_tokens": sum(len(times) for trace in load.traces for times in trace.arrivals.values()),
        "num_generated": stats["requests"]["num_generation_tokens"],
        "seconds": time.perf_counter() - began,
        "segments": watch.segments,
        "samples": dict(watch.samples),
        "num_free_blocks": stats["num_free_blocks"],
        "num_blocks": stats["num_blocks"],
    }


def by_half(values: list[float]) -> tuple[float, float]:
    """Medians of the first and the second half of the values after the warm-up."""
    warm = values[int(WARM_SHARE * len(values)) :]
    return middle(warm[: len(warm) // 2]), middle(warm[len(warm) // 2 :])


def table(figures: dict[str, Any]) -> Table:
    """Table with one row per kind of process."""
    rows = []
    for kind, samples in sorted(figures["samples"].items()):
        memory, descriptors = (by_half([one[field] for one in samples]) for field in (1, 2))
        cpu_s = samples[-1][3] - samples[0][3]
        seconds = samples[-1][0] - samples[0][0]
        cells = [f"{value:.0f}" for value in (*memory, *descriptors)]
        rows.append((kind, *cells, f"{100 * cpu_s / seconds:.1f}"))
    first, last = by_half(figures["segments"])
    columns = "process", "memory MB", "later", "descriptors", "later", "CPU %"
    note = (
        f"Medians of two halves, the first quarter left out; memory is a process's own. Segments: {first:.0f}, later "
        f"{last:.0f}. Free blocks at the end: {figures['num_free_blocks']} of {figures['num_blocks'] - 1}."
    )
    return Table("Processes over time", columns, rows, note)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Plots memory and descriptors over time, by kind of process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    for axes, field, label in zip(
        figure.subplots(2, sharex=True), (1, 2), ("MB of its own", "descriptors"), strict=True
    ):
        for kind, samples in sorted(figures["samples"].items()):
            axes.plot([one[0] / 60 for one in samples], [one[field] for one in samples], label=kind)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.set_xlabel("minutes")
    axes.legend(ncols=3, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Runs the soak test, prints, writes and plots the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--minutes", type=float, help="duration in minutes (default: 30)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96, help="average tokens per choice")
    parser.add_argument("--plot", type=Path, help="SVG or PNG file for the plot; default: no plot")
    args = parser.parse_args()
    args.minutes = args.minutes or (0.5 if args.quick else 30.0)
    quiet()
    pair = chosen_pair(args)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, 8 if args.quick else 24)
    bodies = all_bodies([prompt.text for prompt in prompts], args.max_tokens)
    limits = {"max_model_len": 1024, "max_num_seqs": 4, "num_kv_blocks": 300}
    config = AppConfig(model=pair.model, drafter=str(pair.drafter), served_model_name=NAME, **limits)
    with wingbeat_apps({NAME: config}) as apps:
        figures = asyncio.run(soak(apps[NAME], bodies, args))
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = (
        f"{args.clients} clients and one that leaves; {describe(prompts)}; {figures['seconds'] / 60:.0f} minutes"
    )
    facts["outcome"] = (
        f"{figures['num_requests']} requests, {len(figures['failures'])} failed, "
        f"{len(figures['differences'])} with another text"
    )
    report = Report("Soak", facts, [table(figures)], figures)
    report.show()
    report.save(args.output or RESULTS / "soak.json")
    if args.plot is not None:
        plot(figures, args.plot)
    if figures["failures"] or figures["differences"]:
        print("\n".join((figures["failures"] + figures["differences"])[:20]), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
