"""Engines with the measured model, and their speed; shared by the scripts that run engines."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from _harness import Bench
from _model import BLOCK_SIZE, random_head

from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import block_bytes
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import LoadedModel

MAX_PREFILL_TOKENS = 4096
CHAIN = SpeculationConfig(draft_steps=7, draft_top_k=1, verify_tree_size=8)
CHAIN_LENGTH = 3.9
"""Acceptance length that chains are forced to."""
CONFIDENCE = 20.0
"""Factor on the head's logits: with near-uniform random logits, trees would stop after two levels."""


OTHER_BYTES = 8 << 30
"""Bytes of a case besides keys and values: head, outputs of captured graphs, activations of prompts, workspaces."""


class Case(NamedTuple):
    """A way to speculate, at a batch size."""

    name: str
    batch: int
    speculation: SpeculationConfig
    forced: ForcedAcceptance
    graphs: bool | None = None
    """Value of `EngineConfig.cuda_graphs`."""
    at_least: float | None = None
    """Target: minimum of speculative over plain speed."""

    @property
    def label(self) -> str:
        """Label in names of figures."""
        return f"batch {self.batch}, {self.name}"


class Speed(NamedTuple):
    """Speed over a number of rounds in which all sequences decode."""

    tokens_per_s: float
    round_ms: float
    texts: tuple[tuple[int, ...], ...] = ()
    """Tokens of each sequence, from its first to the last measured round's."""


@contextmanager
def benchmark_mode() -> Iterator[None]:
    """Allows forced acceptance while the block runs."""
    before = os.environ.get(BENCHMARK_VARIABLE)
    os.environ[BENCHMARK_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[BENCHMARK_VARIABLE]
        if before is not None:
            os.environ[BENCHMARK_VARIABLE] = before


def workload(bench: Bench) -> tuple[int, int]:
    """Tokens of each prompt, and number of rounds to measure."""
    return (8, 8) if bench.quick else (1024, 64)


def facts(bench: Bench) -> dict[str, str]:
    """Facts about the workload, as text."""
    context, num_rounds = workload(bench)
    return {
        "workload": f"greedy, prompts of {context} random tokens, {num_rounds} rounds in which all sequences decode",
        "acceptance": "FORCED: drawn from the profile that each figure names; the text is not the model's",
    }


def engine_config(bench: Bench, case: Case, deterministic: bool = False) -> EngineConfig:
    """Configuration with room for running `speed` twice: plainly and with speculation."""
    context, num_rounds = workload(bench)
    # The first sequences decode while the last ones' prompts are still computed.
    rounds = 2 * num_rounds + case.batch * context // MAX_PREFILL_TOKENS
    length = context + rounds * case.speculation.max_path
    blocks = -(-(length + case.speculation.num_nodes) // BLOCK_SIZE)
    with benchmark_mode():
        return EngineConfig(
            max_num_seqs=case.batch,
            max_model_len=length,
            max_num_batched_tokens=MAX_PREFILL_TOKENS,
            block_size=BLOCK_SIZE,
            num_kv_blocks=2 + case.batch * (blocks + 1),
            enable_prefix_caching=False,
            cuda_graphs=case.graphs,
            speculation=case.speculation,
            forced_acceptance=case.forced,
            deterministic=deterministic,
        )


def too_large(bench: Bench, loaded: LoadedModel, case: Case) -> str | None:
    """Reason why a case does not fit into the free device memory; None if it fits, and on the CPU."""
    if bench.device.type != "cuda":
        return None
    config = engine_config(bench, case)
    by_layer = [block_bytes([layer], config.block_size, bench.dtype) for layer in loaded.layers]
    # The drafter's single layer is like the verifier's and has as many blocks.
    need = config.num_kv_blocks * (sum(by_layer) + max(by_layer)) + OTHER_BYTES
    free, _ = torch.cuda.mem_get_info(bench.device)
    return f"needs {need / 2**30:.1f} GiB where {free / 2**30:.1f} GiB are free" if need > free else None


def new_drafter(
    bench: Bench,
    speculation: SpeculationConfig,
    graphs: bool | None = None,
    graph_device: GraphDevice | None = None,
    fp8: bool = False,
) -> EagleDrafter:
    """Creates an EAGLE-3 head of random weights, with confident logits.

    Args:
        graphs: as in `EngineConfig.cuda_graphs`.
        graph_device: replaces CUDA for captures.
        fp8: converts weights as for `drafter_weights` `fp8`.
    """
    head = random_head(bench)
    head.lm_head.weight.mul_(CONFIDENCE)
    if fp8:
        [use_fp8] = hooks("fp8_head")
        use_fp8(head)
    if graph_device is None and bench.device.type == "cuda" and graphs is not False:
        graph_device = CudaGraphDevice(bench.device)
    return EagleDrafter(head, speculation, graph_device)


def speed(
    bench: Bench,
    engine: Engine,
    speculation: bool,
    watch: Callable[[], AbstractContextManager] = nullcontext,
    prompts: Sequence[Sequence[int]] | None = None,
) -> Speed:
    """Measures rounds in which every sequence decodes, after the prompts and some warm-up rounds.

    Args:
        watch: context manager entered during the measurement.
        prompts: one per sequence of the engine; None uses random tokens.
    """
    context, num_rounds = workload(bench)
    batch, on_gpu = engine.config.max_num_seqs, bench.device.type == "cuda"
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True, speculation=speculation)
    texts: dict[str, list[int]] = {f"{speculation}-{index}": [] for index in range(batch)}

    def step() -> int:
        count = 0
        for output in engine.step():
            texts[output.request_id] += output.token_ids
            count += len(output.token_ids)
        return count

    for index, name in enumerate(texts):
        prompt = torch.randint(0, engine.loaded.vocab_size, (context,)).tolist() if prompts is None else prompts[index]
        engine.add_request(Request(name, tuple(prompt), params))
    while not all(texts.values()):
        step()
    for _ in range(num_rounds // 4):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    with watch():
        started, num_tokens = time.perf_counter(), 0
        for _ in range(num_rounds):
            num_tokens += step()
        if on_gpu:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
    written = tuple(map(tuple, texts.values()))
    for name in texts:
        engine.abort_request(name)
    while engine.has_unfinished_requests():
        engine.step()
    return Speed(num_tokens / elapsed, 1e3 * elapsed / num_rounds, written)
