"""Mixture of experts at the shape of Qwen3-30B-A3B, 12 of its 48 layers: capture, time and launches per layer.

Plain steps and a verification, random weights. A layer's figures are those of 12 layers minus those of 2, divided by
10. The details name the implementation of the experts, and the error of a failed capture; then the stage is timed
uncaptured.
"""

from functools import partial
from typing import NamedTuple

import torch
from _harness import Bench, Cases, Figure, Result, run
from _model import Steps, random_model
from kernel_profile import STEPS, profiling
from transformers import Qwen3MoeConfig

from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.verifier.loading.loader import LoadedModel

CONTEXT, NODES = 1024, 16
SHAPES = ((1, 1), (16, 1), (64, 1), (1, NODES), (16, NODES))
"""(sequences, nodes per sequence); one node is a plain step."""
LAYERS, TOY_LAYERS = (12, 2), (3, 1)
_SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "norm_topk_prob": True,
}
_TOY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Cost(NamedTuple):
    """Cost of one step."""

    ms: float
    launches: float
    captured: bool


def moe_config(bench: Bench, num_layers: int) -> Qwen3MoeConfig:
    """Configuration with `num_layers` layers; a toy shape in a quick run."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = {**_SHAPE, **_TOY} if bench.quick else _SHAPE
    return Qwen3MoeConfig(**shape, **ids, num_hidden_layers=num_layers, tie_word_embeddings=False)


def cost(bench: Bench, loaded: LoadedModel, batch: int, nodes: int, failures: dict[str, str]) -> Cost:
    """Measures a plain step or a verification, captured if possible."""
    context = 40 if bench.quick else CONTEXT
    steps = Steps(bench, loaded, batch, context, NODES, () if nodes == 1 else (0,))
    inputs, captured = steps.random_inputs(batch, nodes), True
    bucket = Bucket(batch) if nodes == 1 else Bucket(batch, nodes)
    try:
        runner = steps.plain_runner([batch]) if nodes == 1 else steps.verify_runner([bucket])
        step = partial(runner.run, bucket, inputs)
    except RuntimeError as error:
        failures[f"{len(loaded.layers)} layers, {batch} x {nodes}"], captured = str(error)[:1000], False
        step = partial(steps.decode if nodes == 1 else steps.verify, inputs)
    ms = bench.median_ms(step)
    with profiling(bench) as profiler:
        for _ in range(STEPS):
            step()
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
    column = "self_device_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
    launches = sum(event.count for event in profiler.key_averages() if getattr(event, column) > 0)
    steps.model.remove_taps()
    return Cost(ms, launches / STEPS, captured)


def measure(bench: Bench) -> Result:
    """Measures every shape with both numbers of layers."""
    most, least = TOY_LAYERS if bench.quick else LAYERS
    config = moe_config(bench, most)
    facts = {
        "model": f"{most} layers, hidden {config.hidden_size}, {config.num_experts} experts of "
        f"{config.moe_intermediate_size}, {config.num_experts_per_tok} for each token, vocabulary {config.vocab_size}, "
        f"random {str(bench.dtype).removeprefix('torch.')} weights",
        "context": f"{40 if bench.quick else CONTEXT} tokens",
    }
    cases = Cases(bench, facts, {"captures_failed": {}})
    models = {layers: random_model(bench, moe_config(bench, layers)) for layers in (most, least)}
    implementation = getattr(models[most].model.config, "_experts_implementation", None)
    cases.result.details["experts_implementation"] = str(implementation)

    def one(batch: int, nodes: int, label: str) -> list[Figure]:
        failures = cases.result.details["captures_failed"]
        costs = {layers: cost(bench, loaded, batch, nodes, failures) for layers, loaded in models.items()}
        whole, few = costs[most], costs[least]
        return [
            Figure(f"{label}: captured", float(whole.captured), "", at_least=1.0),
            Figure(f"{label}: step of {most} layers", whole.ms, "ms"),
            Figure(f"{label}: a layer", max(whole.ms - few.ms, 0.0) / (most - least), "ms"),
            Figure(f"{label}: a layer", (whole.launches - few.launches) / (most - least), "launches"),
        ]

    for batch, nodes in ((1, 1), (2, NODES)) if bench.quick else SHAPES:
        label = f"batch {batch}, {'plain' if nodes == 1 else f'{nodes} nodes'}"
        cases.run(label, partial(one, batch, nodes, label))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
