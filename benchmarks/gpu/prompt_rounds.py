"""Rounds of single prompts at the 8B shape: from a prompt's arrival in an idle engine to its first token on the host.

Measured in three ways: captured; the same operations launched one by one, padded alike; and eagerly without such
padding.
"""

import statistics
import time
from functools import partial

import torch
from _engine import CHAIN
from _harness import Bench, Cases, Figure, Result, run
from _model import BLOCK_SIZE, llama_config, random_model, shape_facts

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import LoadedModel

LENGTHS = (5, 100, 200, 384, 600, 1024, 2048)
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, speculation=False)


def lengths(bench: Bench) -> tuple[int, ...]:
    """Lengths of the measured prompts."""
    return LENGTHS[:2] if bench.quick else LENGTHS


def new_engine(
    bench: Bench, loaded: LoadedModel, cuda_graphs: str | None, graph_device: GraphDevice | None = None
) -> Engine:
    """Creates an engine without a drafter.

    Args:
        graph_device: replaces CUDA for captures.
    """
    longest = max(lengths(bench)) + 2
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        block_size=BLOCK_SIZE,
        num_kv_blocks=8 + 4 * -(-longest // BLOCK_SIZE),
        enable_prefix_caching=False,
        cuda_graphs=cuda_graphs,
        speculation=CHAIN,
    )
    return Engine(loaded, config, graph_device=graph_device)


def first_token_ms(bench: Bench, engine: Engine, length: int) -> float:
    """Median milliseconds from a prompt's arrival to its first token, by the host's clock."""
    times = []
    for number in range(3 if bench.quick else 23):
        prompt = torch.randint(0, engine.loaded.vocab_size, (length,)).tolist()
        started = time.perf_counter()
        engine.add_request(Request(str(number), tuple(prompt), FIRST_TOKEN))
        while engine.has_unfinished_requests():
            engine.step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def ways(bench: Bench, length: int, eager: Engine, capturing: Engine | None) -> list[Figure]:
    """Measures one length in every way."""
    found = {"eager": first_token_ms(bench, eager, length)}
    if capturing is not None:
        graphs = capturing.runner.graphs
        for way, graphs.pool.paused in (("captured", False), ("eager, padded alike", True)):
            found[way] = first_token_ms(bench, capturing, length)
    return [Figure(f"prompt of {length} tokens, {way}", ms, "ms") for way, ms in found.items()]


@torch.no_grad()
def measure(bench: Bench, graph_device: GraphDevice | None = None) -> Result:
    """Measures every length; figures are reported as they are measured.

    Args:
        graph_device: replaces CUDA for captures.
    """
    config = llama_config(bench)
    loaded = random_model(bench, config)
    captures = bench.device.type == "cuda" or graph_device is not None
    eager = new_engine(bench, loaded, "decode_only" if captures else None, graph_device)
    capturing = new_engine(bench, loaded, "full", graph_device) if captures else None
    cases = Cases(bench, shape_facts(config, bench.dtype) | {"workload": "one prompt at a time in an idle engine"})
    for length in lengths(bench):
        cases.run(f"{length} tokens", partial(ways, bench, length, eager, capturing))
    if capturing is not None:
        stats = capturing.stats().graphs
        cases.result.details["graph_replays"] = dict(stats.replays)
        cases.result.details["graphs_failed"] = [str(failure) for failure in stats.failed]
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
