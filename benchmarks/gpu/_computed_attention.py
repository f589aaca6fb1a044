"""Decode attention against the bandwidth floor, computed and not measured.

One layer of Llama-3.1-8B in bfloat16 at batch 1. The floor is the bytes of keys and values at the memory's rate. The
computed time adds what the splits' partial results move, and divides by the share of multiprocessors that have work:
programs that wait for another wave, or multiprocessors without one, read nothing. Latency and launches are left out.
"""

import torch

from wingbeat.kernels.attention.device import KNOWN
from wingbeat.kernels.attention.splits import choose_splits
from wingbeat.kernels.attention.tiles import tile_config

HEADS, KV_HEADS, DIM = 32, 8, 128
BYTES_PER_S = {"H100": 3.35e12, "A100": 2.04e12, "L4": 0.30e12, "RTX 4090": 1.01e12}
"""Data sheets: H100 SXM, A100 80 GB, L4, GeForce RTX 4090."""
REGISTERS = 168
"""Of the 16-row and the 64-row tile as compiled, about; see docs/testing.md."""
CONTEXTS = (1024, 8192, 32768, 131072)


def computed(gpu: str, context: int, nodes: int) -> tuple[float, float, int]:
    """Microseconds of the floor, microseconds computed, and programs."""
    limits, rows = KNOWN[gpu], HEADS // KV_HEADS * nodes
    tile = tile_config(torch.bfloat16, DIM, rows, limits)
    at_once = limits.num_sms * limits.resident_programs(tile.shared_bytes, REGISTERS, tile.num_warps)
    row_tiles = -(-rows // tile.block_rows)
    splits = choose_splits(KV_HEADS * row_tiles, at_once, min(rows, tile.block_rows), tile.block_keys)
    tiles = -(-(context + nodes) // tile.block_keys)
    per_split = max(-(-tiles // splits.most) * tile.block_keys, splits.least_keys)
    live = -(-(context + nodes) // per_split)
    programs = KV_HEADS * row_tiles * live
    waves = -(-programs // at_once)
    busy = min(programs / (waves * limits.num_sms), 1.0) if waves == 1 else programs / (waves * at_once)
    keys = 2 * context * KV_HEADS * DIM * 2
    partial = 2 * live * nodes * HEADS * (DIM + 1) * 4 if live > 1 else 0
    floor = keys / BYTES_PER_S[gpu] * 1e6
    return floor, (keys + partial) / BYTES_PER_S[gpu] * 1e6 / busy, programs


def main() -> None:
    """Print the table of docs/benchmarks.md."""
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


if __name__ == "__main__":
    main()
