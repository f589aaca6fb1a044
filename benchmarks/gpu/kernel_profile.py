"""Which kernels the device spends its time in: of whole rounds, and of their stages at batch 1.

Rounds of the demo pair in float32, and of the 8B shape at batch 16 and 64, plainly and with chains, acceptance forced
as in `engine_speed.py`; a plain step, a verification and draft passes of the 8B shape at batch 1. What the graphs
replay, by name, count and time; whole tables go to profile_*.txt in $OUT, or in this folder's results.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, speed, workload
from _harness import Bench, Cases, Figure, Result, run
from _model import Steps, llama_config, random_head, random_model, shape_facts
from draft_round import SHAPES, Pass
from engine_speed import engine_of
from torch.profiler import ProfilerActivity, profile

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, ForcedAcceptance
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.llm import LLM

CONTEXT, NODES, STEPS, TOP = 1024, 16, 5, 40
BATCHES = (16, 64)
"""Of whole rounds at the 8B shape; the stages are of batch 1."""
DEMO_BATCHES = (1, 8)
OUT = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results")


def profiling(bench: Bench) -> profile:
    """Kernels of the device, and operations where it is the CPU."""
    return profile(activities=[ProfilerActivity.CUDA if bench.device.type == "cuda" else ProfilerActivity.CPU])


def profiled(bench: Bench, cases: Cases, name: str, step: Callable[[], object]) -> list[Figure]:
    """Launches and time of one step."""
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


def rounds(bench: Bench, cases: Cases, name: str, engine: Engine) -> list[Figure]:
    """Launches and time of a round, plainly and with drafts."""
    figures = []
    for kind, speculation in (("plain", False), ("chains", True)):
        profiler = profiling(bench)
        speed(bench, engine, speculation, lambda profiler=profiler: profiler)
        figures += told(bench, cases, f"{name}, {kind}", profiler, workload(bench)[1])
    engine.model.remove_taps()
    return figures


def told(bench: Bench, cases: Cases, name: str, profiler: profile, times: int) -> list[Figure]:
    """What was profiled so many times: the table to a file, kernels to the result's details, sums as figures."""
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
    """Of the demo pair as it is stored."""
    context, num_rounds = workload(bench)
    pair, length = demo_pair(), context + 2 * num_rounds * CHAIN.max_path
    config = EngineConfig(
        max_num_seqs=batch, max_model_len=min(length, 2048), num_kv_blocks=2 + batch * 130,
        enable_prefix_caching=False, speculation=CHAIN,
    )  # fmt: skip
    channel = partial(InProcessChannel, device=bench.device)
    llm = LLM(pair.verifier, pair.drafter, config, channel, dtype="float32", device=bench.device.type)
    return rounds(bench, cases, f"demo pair in float32, batch {batch}", llm.engine)


def measure(bench: Bench) -> Result:
    """Rounds and stages, sequences of 1k tokens."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    cases = Cases(bench, shape_facts(config, bench.dtype) | {"context": f"{context} tokens"})
    for batch in DEMO_BATCHES:
        cases.run(f"demo pair, batch {batch}", partial(demo_rounds, bench, cases, batch))
    loaded = random_model(bench, config)

    def of_batch(batch: int) -> list[Figure]:
        case = Case("chain", batch, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH))
        return rounds(bench, cases, f"batch {batch}", engine_of(bench, loaded, case))

    for batch in (2,) if bench.quick else BATCHES:
        cases.run(f"batch {batch}", partial(of_batch, batch))
    steps = Steps(bench, loaded, 1, context, NODES, (1, 2, 3) if bench.quick else (2, 16, 29))
    plain, verify = steps.plain_runner([1]), steps.verify_runner([Bucket(1, NODES)])
    roots, trees = steps.random_inputs(1, 1), steps.random_inputs(1, NODES)
    cases.run("plain", partial(profiled, bench, cases, "plain step", lambda: plain.run(Bucket(1), roots)))
    name = f"verification of {NODES}"
    cases.run("verify", partial(profiled, bench, cases, name, lambda: verify.run(Bucket(1, NODES), trees)))
    head, captured = random_head(bench), bench.device.type == "cuda"
    for shape in SHAPES:
        one = Pass(bench, head, shape.speculation, 1, context, captured)
        step = partial(one, shape.speculation.max_path - 1)
        cases.run(shape.name, partial(profiled, bench, cases, f"draft of a {shape.name}", step))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
