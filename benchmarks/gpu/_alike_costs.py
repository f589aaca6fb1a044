"""Programs, steps and bytes of deterministic mode's launches compared with the usual ones, for a layer of an 8B.

Needs no GPU and is no part of a session: `python benchmarks/gpu/_alike_costs.py` prints the table of
`benchmarks/results/gpu_deterministic_computed.md`. The programs of cuBLAS's products are unknown; their bytes are those
of the weights and the rows.
"""

from typing import NamedTuple

import torch
import triton

from wingbeat.kernels.alike.triton import num_splits, splits_are_shared, tile_of
from wingbeat.kernels.gpu.attention.device import KNOWN
from wingbeat.kernels.gpu.attention.splits import FIXED_SPLITS, choose_num_splits, choose_splits
from wingbeat.kernels.gpu.attention.tiles import fixed_tile, tile_config

LIMITS, CONTEXT, TABLE = KNOWN["H100"], 1024, 2048
HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCABULARY = 32, 8, 128, 4096, 14336, 128256
PRODUCTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate and up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "output matrix": (VOCABULARY, HIDDEN),
}
ROUNDS = {"plain": 1, "chain of 7": 8}


class Cost(NamedTuple):
    """Cost of one launch, or of two."""

    programs: int
    steps: int
    """Steps of the longest program."""
    kilobytes: float
    """Kilobytes in addition to those that both modes read and write."""


def product(rows: int, columns: int, inputs: int) -> Cost:
    """Cost of a product in deterministic mode."""
    cpu, tile = torch.device("cpu"), tile_of(rows, torch.bfloat16)
    splits, height = num_splits(cpu, columns, inputs), min(max(triton.next_power_of_2(rows), 16), tile)
    tiles = triton.cdiv(rows, height), triton.cdiv(columns, tile)
    shared = splits_are_shared(cpu, rows, tiles, splits)
    steps = triton.cdiv(inputs, 64)
    sums = 2 * 4 * splits * columns * height * tiles[0] / 1024 if shared else 0.0
    return Cost(tiles[0] * tiles[1] * (splits if shared else 1), triton.cdiv(steps, splits) if shared else steps, sums)


def attention(reqs: int, nodes: int, alike: bool) -> Cost:
    """Cost of attention over contexts of `CONTEXT` tokens."""
    rows = HEADS // KV_HEADS * nodes
    tile = fixed_tile(torch.bfloat16, DIM, LIMITS) if alike else tile_config(torch.bfloat16, DIM, rows, LIMITS)
    each = triton.cdiv(rows, tile.block_rows) * KV_HEADS
    filling = LIMITS.num_sms * LIMITS.resident_programs(tile.shared_bytes, 1, tile.num_warps)
    splits = FIXED_SPLITS if alike else choose_splits(reqs, each, filling, tile)
    launched = splits.launched(reqs, TABLE, choose_num_splits(each, filling) if alike else splits.most) * each
    length = CONTEXT + nodes
    count = splits.at_most(length)
    keys = max(triton.cdiv(triton.cdiv(length, tile.block_keys), splits.most) * tile.block_keys, splits.least_keys)
    partial = 2 * 4 * count * reqs * nodes * HEADS * (DIM + 1) / 1024 if count > 1 else 0.0
    return Cost(launched, triton.cdiv(min(keys, length), tile.block_keys), partial)


def main() -> None:
    """Prints the table."""
    print("| launch | sequences | round | programs | steps | KB of sums |\n|---|---:|---|---:|---:|---:|")
    for reqs in (1, 16, 64):
        for name, nodes in ROUNDS.items():
            for what, alike in (("attention, usual", False), ("attention, deterministic", True)):
                cost = attention(reqs, nodes, alike)
                print(f"| {what} | {reqs} | {name} | {cost.programs} | {cost.steps} | {cost.kilobytes:,.0f} |")
            for what, shape in PRODUCTS.items():
                cost = product(reqs * nodes, *shape)
                print(f"| {what} | {reqs} | {name} | {cost.programs} | {cost.steps} | {cost.kilobytes:,.0f} |")


if __name__ == "__main__":
    main()
