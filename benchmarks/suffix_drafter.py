"""What suffix drafting costs the host: per committed token, per draft, and in memory, beside prompt lookup.

    .venv/bin/python benchmarks/suffix_drafter.py

Texts are the standard library in the demo's tokens, one token over and over, and random tokens.
"""

import argparse
import os
import platform
import random
import statistics
import time
import tracemalloc

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.base import DraftBatch, Drafter
from wingbeat.runtime.drafters.ngram import NgramDrafter
from wingbeat.runtime.drafters.suffix import SuffixDrafter
from wingbeat.runtime.drafters.suffix_automaton import SuffixAutomaton, Text
from wingbeat.runtime.recordings.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer

HISTORIES = (1000, 8000, 64000)
NUM_DRAFTS = 500
SHAPES = {"chain of 7": SpeculationConfig(7, 1, 16), "tree of 16": SpeculationConfig(5, 4, 16)}


def texts() -> dict[str, list[int]]:
    """Token ids, 64,000 and a few of each."""
    tokenizer, count = Tokenizer.load(demo_pair().verifier), HISTORIES[-1] + NUM_DRAFTS
    code: list[int] = []
    for file in sorted(stdlib_root().glob("*.py")):
        if len(code) < count:
            code += tokenizer.encode(file.read_text(encoding="utf-8"))
    chance = random.Random(1)
    return {"code": code[:count], "one token": [7] * count, "random": [chance.randrange(32000) for _ in range(count)]}


def token_us(token_ids: list[int]) -> float:
    """Microseconds to take in one token, on average."""
    automaton, end = SuffixAutomaton(), Text()
    started = time.perf_counter()
    for token_id in token_ids:
        end = automaton.extend(end, token_id)
    return (time.perf_counter() - started) / len(token_ids) * 1e6


def token_bytes(token_ids: list[int]) -> float:
    """Memory of one token, on average."""
    tracemalloc.start()
    automaton, end = SuffixAutomaton(), Text()
    for token_id in token_ids:
        end = automaton.extend(end, token_id)
    taken = tracemalloc.get_traced_memory()[0] / automaton.num_tokens
    tracemalloc.stop()
    return taken


def batch_of(history: Tensor, length: int, max_path: int) -> DraftBatch:
    """One sequence that wants a tree."""
    none, one = torch.zeros(0, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    return DraftBatch(
        decode_slots=none,
        decode_positions=none,
        decode_num_tokens=none,
        decode_token_ids=none.view(0, max_path),
        decode_taps=torch.zeros(0, max_path, 0),
        chunk_slots=[],
        chunk_positions=[],
        chunk_lens=[],
        chunk_next_token_ids=none,
        chunk_taps=torch.zeros(0, 0),
        proposal_slots=one - 1,
        epochs=one,
        committed_lens=one * length,
        block_tables=one[None],
        temperatures=torch.zeros(1),
        seeds=one,
        token_ids=history[None],
        max_committed_len=length,
    )


def draft_us(drafter: Drafter, token_ids: list[int], length: int, max_path: int) -> list[float]:
    """Microseconds per pass of one more token and one draft, sorted."""
    history = torch.tensor(token_ids)
    drafter.draft(batch_of(history, length, max_path))
    times = []
    for now in range(length + 1, length + 1 + NUM_DRAFTS):
        batch = batch_of(history, now, max_path)
        started = time.perf_counter()
        drafter.draft(batch)
        times.append((time.perf_counter() - started) * 1e6)
    return sorted(times)


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n")
    written = texts()
    columns = [f"us per token, {count} tokens" for count in HISTORIES]
    print("| text | " + " | ".join(columns) + " | bytes per token |\n|---|---:|---:|---:|---:|")
    for name, token_ids in written.items():
        cells = [f"{token_us(token_ids[:count]):.1f}" for count in HISTORIES]
        print(f"| {name} | " + " | ".join(cells) + f" | {token_bytes(token_ids):.0f} |")
    print("\n| a draft, code | history | median us | p99 us |\n|---|---:|---:|---:|")
    for shape, speculation in SHAPES.items():
        makers = {
            "suffix": SuffixDrafter(speculation, max_tokens_per_pass=HISTORIES[-1]),
            "ngram": NgramDrafter(speculation),
        }
        for kind, drafter in makers.items():
            for length in HISTORIES[:2]:
                times = draft_us(drafter, written["code"], length, speculation.max_path)
                p99 = times[int(0.99 * len(times))]
                print(f"| {kind}, {shape} | {length} | {statistics.median(times):.0f} | {p99:.0f} |")


if __name__ == "__main__":
    main()
