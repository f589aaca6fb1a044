"""A plain step at batch 1 relative to its floor, captured and eager, and transformers' generate().

The peer runs the same weights with its static cache and its own torch.compile, timed from token to token.
"""

import statistics
import sys
import time

import torch
from _harness import PEER, Bench, Cases, Figure, Result, run
from _model import Steps, llama_config, plain_step_bytes, random_model, shape_facts

from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.loading.loader import LoadedModel

CONTEXT = 1024
PEER_TOKENS = 64


class TokenTimes:
    """Streamer for generate() that records when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with each token on the host."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""

    def median_ms(self) -> float:
        """Median milliseconds between generated tokens."""
        gaps = [(after - before) * 1e3 for before, after in zip(self.times[1:-1], self.times[2:], strict=True)]
        return statistics.median(gaps)


def peer_ms(bench: Bench, loaded: LoadedModel, context: int) -> float:
    """Milliseconds per token of generate() with its own attention code, compiled in a first run."""
    prompt = torch.randint(0, loaded.vocab_size, (1, context), device=bench.device)
    num_tokens = 4 if bench.quick else PEER_TOKENS
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    loaded.model.set_attn_implementation("sdpa")
    try:
        for _ in range(2):
            streamer = TokenTimes()
            loaded.model.generate(prompt, cache_implementation="static", streamer=streamer, **options)
        return streamer.median_ms()
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)


def measure(bench: Bench) -> Result:
    """Measures one sequence of 1k tokens."""
    config, context = llama_config(bench), 40 if bench.quick else CONTEXT
    loaded = random_model(bench, config)
    floor_ms = plain_step_bytes(config, bench.dtype.itemsize, context) / bench.copy_bytes_per_s() * 1e3
    steps = Steps(bench, loaded, 1, context, 1, ())
    inputs, bucket = steps.random_inputs(1, 1), Bucket(1)
    eager_ms = bench.median_ms(lambda: steps.decode(inputs))
    runner = steps.plain_runner([1])
    step_ms = bench.median_ms(lambda: runner.run(bucket, inputs))
    facts = shape_facts(config, bench.dtype) | {"context": f"{context} tokens, batch 1"}
    cases = Cases(bench, facts)

    def ours() -> list[Figure]:
        return [
            Figure("floor", floor_ms, "ms"),
            Figure("plain step", step_ms, "ms"),
            Figure("plain step over floor", step_ms / floor_ms, "x", at_most=1.15),
            Figure("plain step, not captured", eager_ms, "ms"),
        ]

    def peer() -> list[Figure]:
        ms = peer_ms(bench, loaded, context)
        ratio = Figure("plain step over generate()", step_ms / ms, "x", at_most=1.0)
        return [Figure("generate(), static cache, compiled", ms, "ms"), ratio]

    cases.run("captured and eager", ours)
    if PEER in sys.argv or bench.quick:  # compiles for minutes
        cases.run("generate()", peer)
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
