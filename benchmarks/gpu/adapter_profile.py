"""Kernel profile of a verification in which rows have a LoRA adapter, at the 8B shape, batch 1.

`kernel_profile.py` profiles the same verification without an adapter.
"""

from functools import partial

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import Steps, llama_config, random_model, shape_facts
from kernel_profile import CONTEXT, NODES, profiled

from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.lora.adapter import LinearAdapter
from wingbeat.runtime.verifier.loading.loader import LoadedModel

MAX_LORAS, LORA_RANK = 8, 16


def adapted(bench: Bench, loaded: LoadedModel, cases: Cases, context: int) -> list[Figure]:
    """Profiles a verification whose rows all have one adapter."""
    steps = Steps(bench, loaded, 1, context, NODES, (1, 2, 3) if bench.quick else (2, 16, 29))
    adapters = ModelAdapters(loaded.model, loaded.decoder_layers, MAX_LORAS, LORA_RANK, loaded.inner_linears)
    for path, shape in adapters.linears.items():
        a, b = torch.randn(LORA_RANK, shape.inputs) * 0.01, torch.randn(shape.outputs, LORA_RANK) * 0.01
        adapters.put(1, path, LinearAdapter(a, b))
    adapters.rows = adapters.rows_of(torch.ones(NODES, dtype=torch.int64, device=bench.device), on_host=False)
    trees, runner = steps.random_inputs(1, NODES), steps.verify_runner([Bucket(1, NODES)])
    name = f"verification of {NODES} with an adapter"
    figures = profiled(bench, cases, name, lambda: runner.run(Bucket(1, NODES), trees))
    return [*figures, Figure(name, bench.median_ms(lambda: runner.run(Bucket(1, NODES), trees)), "ms")]


def measure(bench: Bench) -> Result:
    """Measures a sequence of 1k tokens."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    cases = Cases(bench, shape_facts(config, bench.dtype) | {"context": f"{context} tokens"})
    cases.run("one adapter", partial(adapted, bench, random_model(bench, config), cases, context))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
