"""Decoding on a CPU at realistic sizes: random Llama-like models, whose rounds cost as much as those of trained models.

    .venv/bin/python benchmarks/real_size.py [--sizes 0.3 1] [--dtypes float32 bfloat16 int8]

Drafts of random weights are not accepted, so acceptance is forced: each level of a chain of five is accepted with
probability 0.8. Reports for each model: tokens per second plainly and speculating, in turns; milliseconds per pass by
rows; and the share of the memory bandwidth at which a pass reads its weights. All files are in a temporary folder.
"""

import argparse
import gc
import math
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from local_engine import Pair, generate, greedy, quiet
from report import Report, Table, machine_facts, middle, spread
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.verifier.model import VerifierModel

SIZES = {
    "0.3": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
}
"""Model shapes by approximate billions of parameters."""
NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 4, 64, 32000
DRAFT_VOCAB_SIZE = VOCAB_SIZE // 4
"""Size of the draft vocabulary, a quarter as in published heads: 32,000 of Llama 3's 128,256."""
BATCHES, ROWS = (1, 4, 16), (1, 2, 4, 8, 16, 32, 64)
CHAIN, RATE, PROMPT_TOKENS = 5, 0.8, 8
CONTEXT, BLOCK_SIZE = 128, 16
READ_BYTES, TURNS = 1 << 30, 3
WAYS = {"plain": False, "speculating": True}


class Passes(NamedTuple):
    """Measurements of forward passes of one model."""

    weight_bytes: int
    """Bytes of weights that a pass of few rows reads."""
    seconds: dict[int, float]
    """Seconds per pass, by rows."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""


def model_config(size: str) -> LlamaConfig:
    """Configuration of a Llama of about `size` billion parameters."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = SIZES[size] | {"num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB_SIZE}
    return LlamaConfig(**shape, **ids, max_position_embeddings=2048, tie_word_embeddings=False)


def make_pair(size: str, folder: Path) -> Pair:
    """Creates a verifier and an EAGLE-3 head of its shape, stored in bfloat16."""
    torch.manual_seed(0)
    config = model_config(size)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    finally:
        torch.set_default_dtype(before)
    layers = config.num_hidden_layers
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            target_hidden_size=config.hidden_size,
            tap_layers=(2, layers // 2, layers - 3),
            vocab_size=VOCAB_SIZE,
            draft_vocab_size=DRAFT_VOCAB_SIZE,
        )
    )
    save_eagle_head(head, folder / "head")
    return Pair(folder / "model", folder / "head")


def open_pair(pair: Pair, dtype: str, threads: int) -> LLM:
    """Opens an engine with chains of five and forced acceptance."""
    speculation = SpeculationConfig(CHAIN, 1, 1 + CHAIN)
    limits = EngineConfig(
        max_num_seqs=max(BATCHES),
        max_model_len=512,
        num_kv_blocks=1 + max(BATCHES) * (512 // BLOCK_SIZE + 1),
        enable_prefix_caching=False,
        forced_acceptance=ForcedAcceptance.flat(RATE),
        speculation=speculation,
    )
    return LLM(*pair, limits, InProcessChannel, dtype=dtype, device="cpu", threads=threads)


def read_bandwidth(numbers: torch.Tensor) -> float:
    """Bytes per second at which torch's threads read a large tensor, measured by summing it."""
    started = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - started)


@torch.inference_mode()
def passes(llm: LLM, repeats: int) -> Passes:
    """Measures forward passes of sequences with one token each, in turns."""
    loaded = llm.engine.loaded
    limits = EngineConfig(max_num_seqs=max(ROWS), max_model_len=CONTEXT, num_kv_blocks=32)
    cache, model = KVCache(loaded.layers, limits, loaded.dtype, loaded.device), VerifierModel(loaded)
    batches = {rows: dummy_decode_batch(cache, rows, 1, CONTEXT // BLOCK_SIZE) for rows in ROWS}
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    numbers, read = torch.ones(READ_BYTES // 4), []
    for number in range(1 + TURNS * repeats):
        read.append(read_bandwidth(numbers))
        for rows, batch in batches.items():
            started = time.perf_counter()
            model(batch)
            if number:
                seconds[rows].append(time.perf_counter() - started)
    num_bytes = weight_bytes(loaded.model.config) * held_bytes(loaded.decoder_layers[0])
    return Passes(num_bytes, {rows: middle(found) for rows, found in seconds.items()}, middle(read))


def held_bytes(layer: nn.Module) -> int:
    """Bytes per weight element in memory."""
    linear = layer.mlp.down_proj
    packed = getattr(linear, "_panels", None)
    return linear.weight.itemsize if packed is None else packed.storage.itemsize


def weight_bytes(config: LlamaConfig) -> int:
    """Number of weights of all linear layers, which a pass reads."""
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * hidden * heads * config.head_dim + 3 * hidden * config.intermediate_size
    return config.num_hidden_layers * layer + hidden * config.vocab_size


def rates(llm: LLM, batch: int, max_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second by way, in turns, and tokens per round; the first turn is a warm-up and not counted."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(VOCAB_SIZE, (batch, PROMPT_TOKENS), generator=generator).tolist()
    found: dict[str, list[float]] = {way: [] for way in (*WAYS, "tokens per round")}
    for number in range(1 + repeats):
        for way, speculating in WAYS.items():
            result = generate(llm, prompts, greedy(max_tokens if number else 8, speculating))
            if number:
                found[way].append(result.tokens_per_s)
            if number and speculating:
                found["tokens per round"].append(result.metrics.acceptance_length)
    return found


def measure(size: str, dtype: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one model in one dtype."""
    llm = open_pair(Pair(folder / "model", folder / "head"), dtype, args.threads)
    timed = passes(llm, args.repeats)
    lengths = {batch: max(8, args.max_tokens // math.isqrt(batch)) for batch in args.batches}
    found = {batch: rates(llm, batch, length, args.repeats) for batch, length in lengths.items()}
    del llm
    gc.collect()
    return {
        "size": size,
        "dtype": dtype,
        "bandwidth": timed.bandwidth,
        "weight_bytes": timed.weight_bytes,
        "seconds": timed.seconds,
        "tokens_per_s": found,
    }


def pass_table(figures: list[dict[str, Any]]) -> Table:
    """Table of milliseconds per pass by rows."""
    rows = []
    for one in figures:
        seconds, reached = one["seconds"], one["weight_bytes"] / one["seconds"][1] / one["bandwidth"]
        cells = [f"{1e3 * seconds[count]:.1f}" for count in ROWS]
        ratio = f"{seconds[8] / seconds[1]:.2f}"
        measured = f"{one['bandwidth'] / 1e9:.1f}"
        rows.append((f"{one['size']}B {one['dtype']}", *cells, ratio, f"{reached:.0%}", measured))
    columns = ("ms per pass of rows", *map(str, ROWS), "8 rows / 1", "bandwidth reached at 1", "of GB/s")
    return Table(
        "Passes", columns, rows, "Medians of turns; the bandwidth is that of sums over 1 GiB in the same turns."
    )


def rate_table(figures: list[dict[str, Any]]) -> Table:
    """Table of tokens per second, and the speed-up by speculating."""
    rows = []
    for one in figures:
        for batch, found in one["tokens_per_s"].items():
            ratios = [fast / slow for fast, slow in zip(found["speculating"], found["plain"], strict=True)]
            name = f"{one['size']}B {one['dtype']}, {batch}"
            drawn = f"{middle(found['tokens per round']):.2f}"
            rows.append((name, *(spread(found[way]) for way in WAYS), spread(ratios, 2), drawn))
    mean = sum(RATE**level for level in range(CHAIN + 1))
    note = f"Medians and ranges, prompts included. On average a round yields {mean:.2f} tokens by decree."
    columns = ("tokens/s of model, requests at once", *WAYS, "speculating / plain", "tokens per round")
    return Table("Decoding", columns, rows, note)


def main() -> None:
    """Parses options and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="billions of parameters")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="concurrent requests")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of verifier and drafter"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="tokens of a request alone; concurrent requests get fewer"
    )
    parser.add_argument("--quick", action="store_true", help="checks that the script works, measures nothing")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    if args.quick:
        SIZES["0.3"] |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
        args.sizes, args.batches, args.repeats, args.max_tokens = ["0.3"], [1, 4], 1, 8
    os.environ[BENCHMARK_VARIABLE] = "1"
    quiet()
    facts, figures = machine_facts(), []
    for size in args.sizes:
        with TemporaryDirectory() as folder:
            make_pair(size, Path(folder))
            figures += [measure(size, dtype, Path(folder), args) for dtype in args.dtypes]
    facts["model"] = "; ".join(f"{size}B: {SIZES[size]}" for size in args.sizes)
    facts["workload"] = f"{PROMPT_TOKENS} prompt tokens, {args.max_tokens} greedy ones of a request alone, fewer of "
    facts["workload"] += f"several; acceptance forced to {RATE}, chains of {CHAIN}; {args.threads} threads, "
    facts["workload"] += "verifier and drafter in one process"
    report = Report("Decoding at real sizes", facts, [pass_table(figures), rate_table(figures)], {"models": figures})
    report.finish(args, "real_size")


if __name__ == "__main__":
    main()
