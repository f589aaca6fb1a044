"""The whole engine in one process at the 8B shape: plain and speculative decoding in tokens per second.

Weights are random, so acceptance is forced to the profile that each figure names: everything is computed, but the
walk's outcome is drawn. Plain decoding uses the same engine with requests that disable speculation.
"""

from functools import partial

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, engine_config, facts, new_drafter, speed, too_large
from _harness import Bench, Cases, Figure, Result, run
from _model import llama_config, random_model, shape_facts

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.loading.loader import LoadedModel

FLAT_RATE = 0.79
AT_LEAST = {1: 3.7, 4: 3.2, 16: 2.5, 64: 1.7, 256: 0.98}
"""Targets: minimum speed of adaptive trees relative to plain decoding, by batch size."""


def cases(bench: Bench) -> list[Case]:
    """Chains and trees with known figures alone, adaptive trees under load; graphs off for one of them."""
    tree = SpeculationConfig(draft_steps=8, draft_top_k=8, verify_tree_size=60)
    adaptive = SpeculationConfig(draft_steps=7, draft_top_k=4, verify_tree_size=32, adaptive=True)
    flat, of_chain = ForcedAcceptance.flat(FLAT_RATE), ForcedAcceptance.length(CHAIN_LENGTH)
    batches = (1, 3) if bench.quick else tuple(AT_LEAST)
    on_gpu = bench.device.type == "cuda"
    return [
        Case(f"chain of 7, forced {CHAIN_LENGTH}", 1, CHAIN, of_chain, at_least=2.6),
        Case("tree of 60, forced 6.2", 1, tree, ForcedAcceptance.length(6.2), at_least=4.0),
        *([Case(f"chain of 7, forced {CHAIN_LENGTH}, graphs off", 1, CHAIN, of_chain, graphs=False)] * on_gpu),
        *(
            Case(f"adaptive tree, forced {FLAT_RATE} a level", batch, adaptive, flat, at_least=AT_LEAST.get(batch))
            for batch in batches
        ),
    ]


def engine_of(
    bench: Bench,
    loaded: LoadedModel,
    case: Case,
    graph_device: GraphDevice | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """Creates an engine for one case, with its drafter attached on the same device.

    Args:
        graph_device: replaces CUDA for captures of rounds and drafts.
        drafter: replaces the EAGLE-3 head.
    """
    drafter = drafter or new_drafter(bench, case.speculation, case.graphs, graph_device)
    channel = partial(InProcessChannel, device=bench.device)
    return build_engine(loaded, engine_config(bench, case), drafter, channel, graph_device)


def measure_case(bench: Bench, loaded: LoadedModel, case: Case) -> tuple[list[Figure], dict]:
    """Measures plain and speculative decoding by one engine."""
    engine = engine_of(bench, loaded, case)
    plain = speed(bench, engine, speculation=False)
    speculative = speed(bench, engine, speculation=True)
    engine.model.remove_taps()
    stats = engine.stats()
    ratio = speculative.tokens_per_s / plain.tokens_per_s
    figures = [
        Figure(f"{case.label}: plain", plain.tokens_per_s, "tokens/s"),
        Figure(f"{case.label}: speculative", speculative.tokens_per_s, "tokens/s"),
        Figure(f"{case.label}: speculative over plain", ratio, "x", at_least=case.at_least),
        Figure(f"{case.label}: acceptance length", stats.speculation.acceptance_length, "tokens"),
        Figure(f"{case.label}: plain round", plain.round_ms, "ms"),
        Figure(f"{case.label}: speculative round", speculative.round_ms, "ms"),
    ]
    graphs = stats.graphs
    details = {
        "forced_acceptance": list(case.forced.rates),
        "decisions": {} if stats.policy is None else stats.policy.decisions,
        "graphs_failed": [] if graphs is None else [str(failure) for failure in graphs.failed],
        "graph_replays": {} if graphs is None else dict(graphs.replays),
        "graph_memory_bytes": 0 if graphs is None else graphs.memory_bytes,
    }
    return figures, {case.label: details}


@torch.no_grad()
def measure(bench: Bench) -> Result:
    """Measures every case; figures are reported as they are measured."""
    config = llama_config(bench, max_position_embeddings=131072)
    loaded = random_model(bench, config)
    measured = Cases(bench, shape_facts(config, bench.dtype) | facts(bench), {"forced_acceptance": True})

    def one(case: Case) -> list[Figure]:
        why_not = too_large(bench, loaded, case)
        figures, details = measure_case(bench, loaded, case) if why_not is None else ([], {case.label: why_not})
        measured.result.details.update(details)
        return figures

    for case in cases(bench):
        measured.run(case.label, partial(one, case))
    return measured.result


if __name__ == "__main__":
    run(__doc__, measure)
