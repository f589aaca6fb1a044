"""Splits of the context among programs: how long, the memory of their partial results, and their merge."""

import functools
from typing import NamedTuple

import triton
import triton.language as tl

MAX_SPLITS = 128
# Below this many tiles a split costs more in its partial result than it gains.
_MIN_TILES_PER_SPLIT = 2
# Of a split's keys per row: its partial result, float32 and both written and read, is a quarter of what it reads in
# 16-bit keys and values. Fewer would cost many requests more than one alone gains by more programs.
_KEYS_PER_ROW = 8
# The running maximum starts finite, so that a row that has seen nothing yet yields weight 0 instead of inf - inf.
LOWEST = tl.constexpr(-1.0e30)


class Splits(NamedTuple):
    """How long the splits of a request are: by its own length, whatever else is in the batch."""

    most: int
    """Splits of one request, at most MAX_SPLITS."""
    least_keys: int
    """Keys of a split but the last, a multiple of the tile's block_keys: shorter requests have fewer splits."""

    def launched(self, max_keys: int) -> int:
        """Splits that a request of at most `max_keys` keys can have."""
        return max(min(self.most, -(-max_keys // self.least_keys)), 1)


def choose_splits(num_programs: int, device_programs: int, num_rows: int, block_keys: int) -> Splits:
    """Splits by which the programs of one request fill the device.

    Args:
        num_programs: programs of one request without splitting: KV heads * row tiles.
        device_programs: programs the device runs at once.
        num_rows: query rows that share a program's keys.
        block_keys: keys of a tile.
    """
    keys = max(_MIN_TILES_PER_SPLIT * block_keys, _KEYS_PER_ROW * num_rows)
    return Splits(choose_num_splits(num_programs, device_programs), -(-keys // block_keys) * block_keys)


@functools.lru_cache(maxsize=1024)
def choose_num_splits(num_programs: int, device_programs: int) -> int:
    """Fewest splits of the context whose waves of programs are within 85 % of the best found.

    Args:
        num_programs: programs without splitting.
        device_programs: programs the device runs at once.
    """
    if num_programs >= 0.8 * device_programs:
        return 1

    def efficiency(splits: int) -> float:
        waves = num_programs * splits / device_programs
        return waves / max(-(-num_programs * splits // device_programs), 1)

    enough = 0.85 * max(efficiency(splits) for splits in range(1, MAX_SPLITS + 1))
    return next(splits for splits in range(1, MAX_SPLITS + 1) if efficiency(splits) >= enough)


def workspace_size(num_splits: int, num_reqs: int, num_query: int, num_heads: int, value_dim: int) -> int:
    """float32 elements a launch needs for the splits' partial results; 0 where there is one split."""
    return num_splits * num_reqs * num_query * num_heads * (value_dim + 1) if num_splits > 1 else 0


@triton.jit(do_not_specialize=["num_query", "num_splits", "stride_split"])
def merge_splits_kernel(
    partial_ptr,  # float32 [num_splits, num_reqs, num_query, num_heads, VALUE_DIM]
    lse_ptr,  # float32 [num_splits, num_reqs, num_query, num_heads]
    out_ptr,  # [num_reqs, num_query, num_heads, VALUE_DIM]
    stride_split,  # of lse
    stride_out_req,
    stride_out_node,
    stride_out_head,
    num_query,
    num_splits,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cell = row * NUM_HEADS + head
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    every = tl.arange(0, ALL_SPLITS)
    all_lse = tl.load(lse_ptr + every.to(tl.int64) * stride_split + cell, mask=every < num_splits, other=float("-inf"))
    peak = tl.maximum(tl.max(all_lse, 0), LOWEST)
    total = tl.sum(tl.exp2(all_lse - peak), 0)
    acc = tl.zeros([BLOCK_VALUE_DIM], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_SPLITS):
        some = first + tl.arange(0, BLOCK_SPLITS)
        at = some.to(tl.int64) * stride_split + cell
        lse = tl.load(lse_ptr + at, mask=some < num_splits, other=float("-inf"))
        weight = tl.exp2(lse - peak)
        partial = tl.load(
            partial_ptr + at[:, None] * VALUE_DIM + dims[None, :],
            mask=(lse > float("-inf"))[:, None] & (dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * partial, 0)
    acc = acc / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + row // num_query * stride_out_req + row % num_query * stride_out_node + head * stride_out_head
    tl.store(out_ptrs + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
