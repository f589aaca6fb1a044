"""Decode attention against the bandwidth floor, and the programs of a captured launch, computed and not measured.

One layer of Llama-3.1-8B in bfloat16 at batch 1. The floor is the bytes of keys and values at the memory's rate. The
computed time adds what the splits' partial results move, and divides by the share of multiprocessors that have work:
programs that wait for another wave, or multiprocessors without one, read nothing. Latency and launches are left out.

A captured launch knows how long a request may become and not how long it is: its programs are counted beside the splits
of the keys that there are, each of a row tile and a head.
"""

from itertools import product
from typing import NamedTuple

import torch

from wingbeat.kernels.attention.device import KNOWN
from wingbeat.kernels.attention.splits import Splits, choose_splits
from wingbeat.kernels.attention.tiles import tile_config

HEADS, KV_HEADS, DIM = 32, 8, 128
BYTES_PER_S = {"H100": 3.35e12, "A100": 2.04e12, "L4": 0.30e12, "RTX 4090": 1.01e12}
"""Data sheets: H100 SXM, A100 80 GB, L4, GeForce RTX 4090."""
REGISTERS = 168
"""Of the 16-row and the 64-row tile as compiled, about; see docs/testing.md."""
CONTEXTS = (1024, 8192, 32768, 131072)


class Launch(NamedTuple):
    """How a GPU runs plain decodes or trees of that many nodes."""

    splits: Splits
    at_once: int
    """Programs that the GPU runs at once."""
    programs: int
    """Of one split: row tiles and heads."""
    block_keys: int

    def splits_of(self, length: int) -> int:
        """Splits of a request of that many keys."""
        tiles = -(-length // self.block_keys)
        return -(-length // max(-(-tiles // self.splits.most) * self.block_keys, self.splits.least_keys))


def launch(gpu: str, nodes: int) -> Launch:
    """What `tree_attention` chooses."""
    limits, rows = KNOWN[gpu], HEADS // KV_HEADS * nodes
    tile = tile_config(torch.bfloat16, DIM, rows, limits)
    at_once = limits.num_sms * limits.resident_programs(tile.shared_bytes, REGISTERS, tile.num_warps)
    programs = KV_HEADS * -(-rows // tile.block_rows)
    splits = choose_splits(programs, at_once, min(rows, tile.block_rows), tile.block_keys)
    return Launch(splits, at_once, programs, tile.block_keys)


def computed(gpu: str, context: int, nodes: int) -> tuple[float, float, int]:
    """Microseconds of the floor, microseconds computed, and programs."""
    chosen = launch(gpu, nodes)
    live = chosen.splits_of(context + nodes)
    programs, at_once, num_sms = chosen.programs * live, chosen.at_once, KNOWN[gpu].num_sms
    waves = -(-programs // at_once)
    busy = min(programs / (waves * num_sms), 1.0) if waves == 1 else programs / (waves * at_once)
    keys = 2 * context * KV_HEADS * DIM * 2
    partial = 2 * live * nodes * HEADS * (DIM + 1) * 4 if live > 1 else 0
    floor = keys / BYTES_PER_S[gpu] * 1e6
    return floor, (keys + partial) / BYTES_PER_S[gpu] * 1e6 / busy, programs


def launched(gpu: str, nodes: int, num_reqs: int, context: int, max_keys: int) -> tuple[int, int, int]:
    """Tiles of rows and splits that have keys, programs launched, and what one program for each split of the tables
    would be."""
    chosen = launch(gpu, nodes)
    work = num_reqs * chosen.splits_of(context + nodes)
    most = num_reqs * chosen.splits.at_most(max_keys)
    return tuple(chosen.programs * size for size in (work, chosen.splits.launched(num_reqs, max_keys), most))


def main() -> None:
    """Print the tables of docs/benchmarks.md."""
    print("| computed: floor -> time in us (programs) | " + " | ".join(BYTES_PER_S) + " |")
    print("| --- |" + " --- |" * len(BYTES_PER_S))
    for nodes in (1, 16):
        for context in CONTEXTS:
            cells = []
            for gpu in BYTES_PER_S:
                floor, time, programs = computed(gpu, context, nodes)
                cells.append(f"{floor:.1f} -> {time:.1f} ({programs})")
            what = "plain" if nodes == 1 else f"tree of {nodes}"
            print(f"| {what}, context {context // 1024}k | " + " | ".join(cells) + " |")
    print("\n| H100: work on programs (splits of the tables) | plain | tree of 16 |\n| --- | --- | --- |")
    for num_reqs, context, max_keys in product((1, 16, 128), (1024, 32768), (8192, 131072)):
        if context <= max_keys:
            cells = ("{} on {} ({})".format(*launched("H100", nodes, num_reqs, context, max_keys)) for nodes in (1, 16))
            what = f"batch {num_reqs}, context {context // 1024}k, tables of {max_keys // 1024}k"
            print(f"| {what} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
