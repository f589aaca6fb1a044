"""Verification of a draft tree relative to a plain step: forward, choice, walk, compaction, taps."""

from functools import partial

from _harness import Bench, Cases, Figure, Result, run
from _model import MAX_DEPTH, Steps, llama_config, plain_step_bytes, random_model, shape_facts

from wingbeat.runtime.graphs.graph_runner import Bucket

CONTEXT = 1024
NODES = (8, 16, 32, 60)
BATCHES = (1, 8)
AT_MOST = {8: 1.10, 16: 1.15, 32: 1.20, 60: 1.30}
"""Targets at batch 1, where a step is bound by reading the weights: maximum ratio by nodes."""


def measure(bench: Bench) -> Result:
    """Measures sequences of 1k tokens each."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    taps = (1, 2, 3) if bench.quick else (2, 16, 29)
    steps = Steps(bench, random_model(bench, config), max(BATCHES), context, max(NODES), taps)
    plain = steps.plain_runner(BATCHES)
    verify = steps.verify_runner([Bucket(batch, nodes) for batch in BATCHES for nodes in NODES])
    floor_ms = plain_step_bytes(config, bench.dtype.itemsize, context) / bench.copy_bytes_per_s() * 1e3
    facts = shape_facts(config, bench.dtype) | {
        "context": f"{context} tokens a sequence",
        "trees": f"random tokens, at most {MAX_DEPTH} levels below the root",
    }
    details = {"graph_memory_bytes": steps.pool.stats.memory_bytes} if steps.pool is not None else {}
    cases, plain_ms = Cases(bench, facts, details), {}

    def plain_step(batch: int) -> list[Figure]:
        roots = steps.random_inputs(batch, 1)
        plain_ms[batch] = bench.median_ms(lambda: plain.run(Bucket(batch), roots))
        floor = [Figure("plain step over floor", plain_ms[batch] / floor_ms, "x")] if batch == 1 else []
        return [Figure(f"plain step, batch {batch}", plain_ms[batch], "ms"), *floor]

    def verification(batch: int, nodes: int) -> list[Figure]:
        trees, bucket = steps.random_inputs(batch, nodes), Bucket(batch, nodes)
        ms = bench.median_ms(lambda: verify.run(bucket, trees))
        name, target = f"verify {nodes} nodes", AT_MOST[nodes] if batch == 1 else None
        ratio = Figure(f"{name} over plain, batch {batch}", ms / plain_ms[batch], "x", target)
        return [Figure(f"{name}, batch {batch}", ms, "ms"), ratio]

    for batch in BATCHES:
        cases.run(f"plain, batch {batch}", partial(plain_step, batch))
        for nodes in NODES:
            cases.run(f"{nodes} nodes, batch {batch}", partial(verification, batch, nodes))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
