"""The whole engine in one process at the 8B shape: plain and speculative decoding in tokens per second.

Weights are random, so acceptance is forced to the profile that each figure names: everything is computed, the walk's
outcome is drawn. Plain decoding is the same engine with requests that ask for no speculation.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from _harness import Bench, Figure, Result, run
from _model import BLOCK_SIZE, llama_config, random_model, shape_facts

from wingbeat.cluster.channel import DrafterSide, InProcessChannel, VerifierSide
from wingbeat.cluster.cuda_ipc import DEVICE_FIELDS, HOST_FIELDS
from wingbeat.cluster.memory import Region, buffer_bytes, carve
from wingbeat.runtime.batch import ChannelSpec
from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.eagle_head import EagleHead, EagleHeadConfig
from wingbeat.runtime.engine import Engine
from wingbeat.runtime.graph_device import CudaGraphDevice
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.model_loader import LoadedModel
from wingbeat.runtime.request import Request, SamplingParams

FLAT_RATE = 0.79
MAX_PREFILL_TOKENS = 4096
CONFIDENCE = 20.0
"""Factor on the head's logits: near-uniform random ones would grow trees of two levels."""


class Case(NamedTuple):
    """One way to speculate, at one batch size."""

    name: str
    batch: int
    speculation: SpeculationConfig
    forced: ForcedAcceptance
    graphs: bool | None = None
    """`EngineConfig.cuda_graphs`"""


class Speed(NamedTuple):
    """Of a number of rounds in which all sequences decode."""

    tokens_per_s: float
    round_ms: float


class DeviceChannel(InProcessChannel):
    """`InProcessChannel` whose tensors lie where `wingbeat.cluster.cuda_ipc` puts them; one stream orders both ends."""

    def __init__(self, spec: ChannelSpec, device: torch.device) -> None:
        super().__init__(spec)
        host = torch.zeros(buffer_bytes(spec, HOST_FIELDS), dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(buffer_bytes(spec, DEVICE_FIELDS), dtype=torch.uint8, device=device)
        regions = Region(host, HOST_FIELDS), Region(there, DEVICE_FIELDS)
        self._memory = carve(spec, self._memory.words, *regions)
        self.verifier_end = VerifierSide(self._memory, self._doorbell)
        self.drafter_end = DrafterSide(self._memory, incarnation=1)


@contextmanager
def benchmark_mode() -> Iterator[None]:
    """Allow forced acceptance meanwhile."""
    before = os.environ.get(BENCHMARK_VARIABLE)
    os.environ[BENCHMARK_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[BENCHMARK_VARIABLE]
        if before is not None:
            os.environ[BENCHMARK_VARIABLE] = before


def cases(bench: Bench) -> list[Case]:
    """Chains and trees of known figures alone, adaptive trees under load; graphs off for one of them."""
    chain = SpeculationConfig(draft_steps=7, draft_top_k=1, verify_tree_size=8)
    tree = SpeculationConfig(draft_steps=8, draft_top_k=8, verify_tree_size=60)
    adaptive = SpeculationConfig(draft_steps=7, draft_top_k=4, verify_tree_size=32, adaptive=True)
    flat = ForcedAcceptance.flat(FLAT_RATE)
    batches = (1, 3) if bench.quick else (1, 4, 16, 64, 256)
    chosen = [
        Case("chain of 7, forced 3.9", 1, chain, ForcedAcceptance.length(3.9)),
        Case("tree of 60, forced 6.2", 1, tree, ForcedAcceptance.length(6.2)),
        *(Case(f"adaptive tree, forced {FLAT_RATE} a level", batch, adaptive, flat) for batch in batches),
    ]
    if bench.device.type == "cuda":
        chosen.append(Case("chain of 7, forced 3.9, graphs off", 1, chain, ForcedAcceptance.length(3.9), graphs=False))
    return chosen


def eagle_head(bench: Bench, loaded: LoadedModel) -> EagleHead:
    """Random weights, sure of themselves."""
    target = loaded.model.config
    config = EagleHeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        target_hidden_size=target.hidden_size,
        tap_layers=(1, 2, 3) if bench.quick else (2, 16, 29),
        vocab_size=target.vocab_size,
        draft_vocab_size=64 if bench.quick else 32000,
    )
    with torch.device(bench.device):
        head = EagleHead(config)
    head.lm_head.weight.mul_(CONFIDENCE)
    return head.to(bench.dtype).eval().requires_grad_(False)


def engine_of(bench: Bench, loaded: LoadedModel, head: EagleHead, case: Case, length: int) -> Engine:
    """An engine for one case, its drafter attached on the same device."""
    on_gpu = bench.device.type == "cuda"
    blocks = -(-(length + case.speculation.num_nodes) // BLOCK_SIZE)
    with benchmark_mode():
        config = EngineConfig(
            max_num_seqs=case.batch,
            max_model_len=length,
            max_num_batched_tokens=MAX_PREFILL_TOKENS,
            block_size=BLOCK_SIZE,
            num_kv_blocks=2 + case.batch * (blocks + 1),
            enable_prefix_caching=False,
            cuda_graphs=case.graphs,
            speculation=case.speculation,
            forced_acceptance=case.forced,
        )
    graphs = CudaGraphDevice(bench.device) if on_gpu and case.graphs is not False else None
    drafter = EagleDrafter(head, case.speculation, graphs)

    def channel(spec: ChannelSpec) -> InProcessChannel:
        return DeviceChannel(spec, bench.device) if on_gpu else InProcessChannel(spec)

    return build_engine(loaded, config, drafter, channel)


def speed(bench: Bench, engine: Engine, context: int, num_rounds: int, speculation: bool) -> Speed:
    """Rounds in which every sequence decodes, after prompts of `context` tokens and some rounds to warm up."""
    batch, on_gpu = engine.config.max_num_seqs, bench.device.type == "cuda"
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True, speculation=speculation)
    for index in range(batch):
        prompt = torch.randint(0, engine.loaded.vocab_size, (context,)).tolist()
        engine.add_request(Request(f"{speculation}-{index}", tuple(prompt), params))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in engine.step() if output.token_ids}
    for _ in range(num_rounds // 4):
        engine.step()
    if on_gpu:
        torch.cuda.synchronize()
    started, num_tokens = time.perf_counter(), 0
    for _ in range(num_rounds):
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    if on_gpu:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    for index in range(batch):
        engine.abort_request(f"{speculation}-{index}")
    while engine.has_unfinished_requests():
        engine.step()
    return Speed(num_tokens / elapsed, 1e3 * elapsed / num_rounds)


def measure_case(bench: Bench, loaded: LoadedModel, head: EagleHead, case: Case) -> tuple[list[Figure], dict]:
    """Plain and speculative decoding by one engine."""
    context, num_rounds = (8, 8) if bench.quick else (1024, 64)
    # The first sequences decode while the last ones' prompts are computed.
    rounds = 2 * num_rounds + case.batch * context // MAX_PREFILL_TOKENS
    engine = engine_of(bench, loaded, head, case, context + rounds * case.speculation.max_path)
    plain = speed(bench, engine, context, num_rounds, speculation=False)
    speculative = speed(bench, engine, context, num_rounds, speculation=True)
    engine.model.remove_taps()
    stats = engine.stats()
    label = f"batch {case.batch}, {case.name}"
    figures = [
        Figure(f"{label}: plain", plain.tokens_per_s, "tokens/s"),
        Figure(f"{label}: speculative", speculative.tokens_per_s, "tokens/s"),
        Figure(f"{label}: speculative over plain", speculative.tokens_per_s / plain.tokens_per_s, "x"),
        Figure(f"{label}: acceptance length", stats.speculation.acceptance_length, "tokens"),
        Figure(f"{label}: plain round", plain.round_ms, "ms"),
        Figure(f"{label}: speculative round", speculative.round_ms, "ms"),
    ]
    graphs = stats.graphs
    details = {
        "forced_acceptance": list(case.forced.rates),
        "decisions": {} if stats.policy is None else stats.policy.decisions,
        "graphs_failed": [] if graphs is None else [str(failure) for failure in graphs.failed],
        "graph_replays": {} if graphs is None else dict(graphs.replays),
        "graph_memory_bytes": 0 if graphs is None else graphs.memory_bytes,
    }
    return figures, {label: details}


@torch.no_grad()
def measure(bench: Bench) -> Result:
    """Every case; what is measured is reported as it comes."""
    config = llama_config(bench, max_position_embeddings=131072)
    loaded = random_model(bench, config)
    head = eagle_head(bench, loaded)
    facts = shape_facts(config, bench.dtype) | {
        "workload": f"greedy, prompts of {8 if bench.quick else 1024} random tokens, all sequences decoding",
        "acceptance": "FORCED: drawn from the profile that each figure names; the text is not the model's",
    }
    result = Result(facts, [], {"forced_acceptance": True})
    for case in cases(bench):
        figures, details = measure_case(bench, loaded, head, case)
        result = Result(facts, result.figures + figures, result.details | details)
        bench.report(result)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    run(__doc__, measure)
