"""Kernel profile of whole rounds, and of their stages at batch 1.

Cases: rounds of the demo pair in float32, and of the 8B shape at batch 16 and 64, plainly and with chains, acceptance
forced as in `engine_speed.py`, and with chains of a float8 head; prompts of 1,024 and 2,048 tokens; a plain step, a
verification and draft passes of the 8B shape at batch 1. Reports kernels by name, count and time; full tables are
written to profile_*.txt in $OUT, or in this folder's results. `--only NAMES` selects cases.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, new_drafter, speed, workload
from _harness import Bench, Cases, Figure, Result, run
from _model import Steps, llama_config, random_head, random_model, shape_facts
from draft_round import SHAPES, Pass, Shape
from engine_speed import engine_of
from prompt_rounds import FIRST_TOKEN, lengths, new_engine
from torch.profiler import ProfilerActivity, profile

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, ForcedAcceptance
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.loading.loader import LoadedModel

CONTEXT, NODES, STEPS, TOP = 1024, 16, 5, 40
PROMPTS, FP8_BATCHES = (1024, 2048), (1, 64)
BATCHES = (16, 64)
"""Batch sizes of whole rounds at the 8B shape; stages are measured at batch 1."""
DEMO_BATCHES = (1, 8)
OUT = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results")


def profiling(bench: Bench) -> profile:
    """Profiler of the device's kernels, or of operations on the CPU."""
    return profile(activities=[ProfilerActivity.CUDA if bench.device.type == "cuda" else ProfilerActivity.CPU])


def profiled(bench: Bench, cases: Cases, name: str, step: Callable[[], object]) -> list[Figure]:
    """Profiles one step: launches and time."""
    on_gpu = bench.device.type == "cuda"
    step()
    if on_gpu:
        torch.cuda.synchronize()
    with profiling(bench) as profiler:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    return told(bench, cases, name, profiler, STEPS)


KINDS = MappingProxyType({"plain": False, "chains": True})
"""Kinds of rounds -> whether they speculate."""


def rounds(bench: Bench, cases: Cases, name: str, engine: Engine, kinds: Mapping[str, bool] = KINDS) -> list[Figure]:
    """Profiles a round of each kind: launches and time."""
    figures = []
    for kind, speculation in kinds.items():
        profiler = profiling(bench)
        speed(bench, engine, speculation, lambda profiler=profiler: profiler)
        figures += told(bench, cases, f"{name}, {kind}", profiler, workload(bench)[1])
    engine.model.remove_taps()
    return figures


def told(bench: Bench, cases: Cases, name: str, profiler: profile, times: int) -> list[Figure]:
    """Reports a profile of `times` repetitions: table to a file, kernels to the result's details, sums as figures."""
    on_gpu = bench.device.type == "cuda"
    averages = profiler.key_averages()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    OUT.mkdir(parents=True, exist_ok=True)
    table = averages.table(sort_by=column, row_limit=TOP, max_name_column_width=100)
    (OUT / f"profile_{name.replace(', ', '_').replace(' ', '_')}.txt").write_text(table)
    kernels = sorted(averages, key=lambda event: getattr(event, column), reverse=True)
    kernels = [event for event in kernels if getattr(event, column) > 0]
    cases.result.details[name] = [
        {"kernel": event.key[:100], "count": event.count / times, "us": getattr(event, column) / times}
        for event in kernels[:TOP]
    ]
    return [
        Figure(f"{name}: kernels", sum(event.count for event in kernels) / times, "launches"),
        Figure(f"{name}: in kernels", sum(getattr(event, column) for event in kernels) / times / 1e3, "ms"),
    ]


def demo_rounds(bench: Bench, cases: Cases, batch: int) -> list[Figure]:
    """Profiles rounds of the demo pair in its stored dtype."""
    context, num_rounds = workload(bench)
    pair, length = demo_pair(), context + 2 * num_rounds * CHAIN.max_path
    config = EngineConfig(
        max_num_seqs=batch, max_model_len=min(length, 2048), num_kv_blocks=2 + batch * 130,
        enable_prefix_caching=False, speculation=CHAIN,
    )  # fmt: skip
    channel = partial(InProcessChannel, device=bench.device)
    llm = LLM(pair.verifier, pair.drafter, config, channel, dtype="float32", device=bench.device.type)
    return rounds(bench, cases, f"demo pair in float32, batch {batch}", llm.engine)


def prompt(bench: Bench, loaded: LoadedModel, cases: Cases, length: int) -> list[Figure]:
    """Profiles a prompt in an idle engine, from its arrival to its first token."""
    engine = new_engine(bench, loaded, "decode_only" if bench.device.type == "cuda" else None)

    def step() -> None:
        tokens = torch.randint(0, loaded.vocab_size, (length,)).tolist()
        engine.add_request(Request("prompt", tuple(tokens), FIRST_TOKEN))
        while engine.has_unfinished_requests():
            engine.step()

    return profiled(bench, cases, f"prompt of {length} tokens", step)


def whole_rounds(bench: Bench, loaded: LoadedModel, cases: Cases) -> None:
    """Profiles rounds of the 8B shape."""

    def of_batch(batch: int, fp8: bool) -> list[Figure]:
        case = Case("chain", batch, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH))
        if not fp8:
            return rounds(bench, cases, f"batch {batch}", engine_of(bench, loaded, case))
        engine = engine_of(bench, loaded, case, drafter=new_drafter(bench, CHAIN, fp8=True))
        return rounds(bench, cases, f"batch {batch}, fp8 head", engine, {"chains": True})

    for batch in (2,) if bench.quick else BATCHES:
        cases.run(f"batch {batch}", partial(of_batch, batch, False))
    for batch in (2,) if bench.quick else FP8_BATCHES:
        cases.run(f"fp8 head, batch {batch}", partial(of_batch, batch, True))


def stages(bench: Bench, loaded: LoadedModel, cases: Cases, context: int) -> None:
    """Profiles stages of the 8B shape at batch 1."""
    for length in lengths(bench) if bench.quick else PROMPTS:
        cases.run(f"prompt of {length}", partial(prompt, bench, loaded, cases, length))
    steps = Steps(bench, loaded, 1, context, NODES, (1, 2, 3) if bench.quick else (2, 16, 29))

    def plain() -> list[Figure]:
        roots, runner = steps.random_inputs(1, 1), steps.plain_runner([1])
        return profiled(bench, cases, "plain step", lambda: runner.run(Bucket(1), roots))

    def verify() -> list[Figure]:
        trees, runner = steps.random_inputs(1, NODES), steps.verify_runner([Bucket(1, NODES)])
        return profiled(bench, cases, f"verification of {NODES}", lambda: runner.run(Bucket(1, NODES), trees))

    def draft(shape: Shape) -> list[Figure]:
        one = Pass(bench, random_head(bench), shape.speculation, 1, context, bench.device.type == "cuda")
        step = partial(one, shape.speculation.max_path - 1)
        return profiled(bench, cases, f"draft of a {shape.name}", step)

    cases.run("plain step", plain)
    cases.run("verification", verify)
    for shape in SHAPES:
        cases.run(f"draft of a {shape.name}", partial(draft, shape))


def measure(bench: Bench) -> Result:
    """Profiles rounds and stages with sequences of 1k tokens."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    cases = Cases(bench, shape_facts(config, bench.dtype) | {"context": f"{context} tokens"})
    for batch in DEMO_BATCHES:
        cases.run(f"demo pair, batch {batch}", partial(demo_rounds, bench, cases, batch))
    loaded = random_model(bench, config)
    whole_rounds(bench, loaded, cases)
    stages(bench, loaded, cases, context)
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
