"""Which kernels a plain step, a verification and a draft pass spend their time in, at the 8B shape and batch 1.

What the graphs replay, by name, count and time; whole tables go to profile_*.txt in $OUT, or in this folder's results.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import Steps, llama_config, random_head, random_model, shape_facts
from draft_round import SHAPES, Pass
from torch.profiler import ProfilerActivity, profile

from wingbeat.runtime.graphs.graph_runner import Bucket

CONTEXT, NODES, STEPS, TOP = 1024, 16, 5, 40
OUT = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results")


def profiled(bench: Bench, cases: Cases, name: str, step: Callable[[], object]) -> list[Figure]:
    """Launches and time of one step."""
    on_gpu = bench.device.type == "cuda"
    step()
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    OUT.mkdir(parents=True, exist_ok=True)
    table = averages.table(sort_by=column, row_limit=TOP, max_name_column_width=100)
    (OUT / f"profile_{name.replace(' ', '_')}.txt").write_text(table)
    kernels = sorted(averages, key=lambda event: getattr(event, column), reverse=True)
    kernels = [event for event in kernels if getattr(event, column) > 0]
    cases.result.details[name] = [
        {"kernel": event.key[:100], "count": event.count / STEPS, "us": getattr(event, column) / STEPS}
        for event in kernels[:TOP]
    ]
    return [
        Figure(f"{name}: kernels", sum(event.count for event in kernels) / STEPS, "launches"),
        Figure(f"{name}: in kernels", sum(getattr(event, column) for event in kernels) / STEPS / 1e3, "ms"),
    ]


def measure(bench: Bench) -> Result:
    """One sequence of 1k tokens."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    steps = Steps(bench, random_model(bench, config), 1, context, NODES, (1, 2, 3) if bench.quick else (2, 16, 29))
    cases = Cases(bench, shape_facts(config, bench.dtype) | {"context": f"{context} tokens, batch 1"})
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
