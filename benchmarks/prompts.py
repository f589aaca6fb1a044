"""Prompts on a CPU, by prompt tokens per round: throughput, and time to the first token.

    .venv/bin/python benchmarks/prompts.py [--sizes 0.3 1] [--chunks 64 128 256 512 1024 2048]

Random Llama-like models (`real_size.py`), no drafter, no prefix cache; requests end with their first token. The time of
a round is the time that a concurrently decoding request waits for its next token.
"""

import argparse
import gc
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from local_engine import greedy, quiet
from real_size import SIZES, VOCAB_SIZE, make_pair
from report import Report, Table, machine_facts, middle

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.llm import LLM

CHUNKS = (64, 128, 256, 512, 1024, 2048)
LENGTHS, BATCHES = (512, 1500), (1, 4)
MAX_MODEL_LEN = 2048


def open_engine(model: Path, dtype: str, chunk: int, threads: int) -> LLM:
    """Opens an engine that computes `chunk` prompt tokens per round."""
    limits = EngineConfig(
        max_num_seqs=max(BATCHES),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=chunk,
        num_kv_blocks=1 + max(BATCHES) * (MAX_MODEL_LEN // 16 + 1),
        enable_prefix_caching=False,
    )
    return LLM(model, "none", limits, InProcessChannel, dtype=dtype, device="cpu", threads=threads)


def seconds(llm: LLM, length: int, batch: int, repeats: int) -> list[float]:
    """Seconds until all of `batch` requests have their first token, by repeat."""
    prompts = torch.randint(VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(length)).tolist()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        llm.generate(prompts, [greedy(1)] * batch)
        found.append(time.perf_counter() - started)
    return found


def measure(model: Path, size: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures an engine for every chunk size."""
    figures = []
    for chunk in args.chunks:
        llm = open_engine(model, dtype, chunk, args.threads)
        seconds(llm, 64, 1, 1)
        for length in args.lengths:
            for batch in args.batches:
                found = seconds(llm, length, batch, args.repeats)
                figures.append(
                    {"size": size, "dtype": dtype, "chunk": chunk, "length": length, "batch": batch, "seconds": found}
                )
        del llm
        gc.collect()
    return figures


def table(figures: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    """Table of tokens per second by chunk size, with the seconds in brackets."""
    rows = []
    for size, dtype, length, batch in dict.fromkeys(
        (one["size"], one["dtype"], one["length"], one["batch"]) for one in figures
    ):
        cells = []
        for chunk in args.chunks:
            key = {"size": size, "dtype": dtype, "length": length, "batch": batch, "chunk": chunk}
            [found] = [middle(one["seconds"]) for one in figures if key.items() <= one.items()]
            cells.append(f"{length * batch / found:.0f} ({found:.2f})")
        rows.append((f"{size}B {dtype}, {batch} of {length}", *cells))
    note = "Medians; in brackets the seconds until all requests have their first token."
    return Table("Prompts", ("tokens/s by prompt tokens per round", *map(str, args.chunks)), rows, note)


def main() -> None:
    """Parses options and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["0.3"], choices=SIZES, help="billions of parameters")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--chunks", nargs="+", type=int, default=list(CHUNKS), help="prompt tokens per round")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of a prompt")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="concurrent requests")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="checks that the script works, measures nothing")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    if args.quick:
        SIZES["0.3"] |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
        args.sizes, args.chunks, args.lengths, args.repeats = ["0.3"], [64, 512], [128], 1
    quiet()
    facts, figures = machine_facts(), []
    for size in args.sizes:
        with TemporaryDirectory() as folder:
            model = make_pair(size, Path(folder)).model
            for dtype in args.dtypes:
                figures += measure(model, size, dtype, args)
    facts["model"] = "; ".join(f"{size}B: {SIZES[size]}" for size in args.sizes)
    facts["workload"] = f"random prompts, one token each; {args.threads} threads, no drafter"
    report = Report("Prompts by chunks", facts, [table(figures, args)], {"runs": figures})
    report.finish(args, "prompts")


if __name__ == "__main__":
    main()
