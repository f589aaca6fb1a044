"""Verification of a token tree over a plain step: forward, choice, walk, compaction and taps, by nodes and batch."""

from _harness import Bench, Figure, Result, run
from _model import MAX_DEPTH, Steps, llama_config, random_model, shape_facts

from wingbeat.runtime.graphs.graph_runner import Bucket

CONTEXT = 1024
NODES = (8, 16, 32, 60)
BATCHES = (1, 8)
AT_MOST = {8: 1.10, 16: 1.15, 32: 1.20, 60: 1.30}
"""Targets at batch 1, where a step is bound by reading the weights."""


def measure(bench: Bench) -> Result:
    """Sequences of 1k tokens each."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    taps = (1, 2, 3) if bench.quick else (2, 16, 29)
    steps = Steps(bench, random_model(bench, config), max(BATCHES), context, max(NODES), taps)
    plain = steps.plain_runner(BATCHES)
    verify = steps.verify_runner([Bucket(batch, nodes) for batch in BATCHES for nodes in NODES])
    figures = []
    for batch in BATCHES:
        roots = steps.random_inputs(batch, 1)
        plain_ms = bench.median_ms(lambda batch=batch, roots=roots: plain.run(Bucket(batch), roots))
        figures.append(Figure(f"plain step, batch {batch}", plain_ms, "ms"))
        for nodes in NODES:
            trees = steps.random_inputs(batch, nodes)
            ms = bench.median_ms(lambda bucket=Bucket(batch, nodes), trees=trees: verify.run(bucket, trees))
            figures.append(Figure(f"verify {nodes} nodes, batch {batch}", ms, "ms"))
            target = AT_MOST[nodes] if batch == 1 else None
            figures.append(Figure(f"verify {nodes} nodes over plain, batch {batch}", ms / plain_ms, "x", target))
    facts = shape_facts(config, bench.dtype) | {
        "context": f"{context} tokens a sequence",
        "trees": f"random tokens, at most {MAX_DEPTH} levels below the root",
    }
    details = {"graph_memory_bytes": steps.pool.stats.memory_bytes} if steps.pool is not None else {}
    return Result(facts, figures, details)


if __name__ == "__main__":
    run(__doc__, measure)
