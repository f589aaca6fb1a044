"""Splits of the context among programs: how many, the memory of their partial results, and their merge."""

import functools

import torch
import triton
import triton.language as tl

MAX_SPLITS = 128
# Below this many tiles a split costs more in its partial result than it gains.
_MIN_TILES_PER_SPLIT = 2
# The running maximum starts finite, so that a row that has seen nothing yet yields weight 0 instead of inf - inf.
LOWEST = tl.constexpr(-1.0e30)


@functools.lru_cache(maxsize=1024)
def choose_num_splits(num_programs: int, num_tiles: int, device_programs: int) -> int:
    """Fewest splits of the context whose waves of programs are within 85 % of the best found.

    Args:
        num_programs: programs without splitting: requests * KV heads * row tiles.
        num_tiles: key tiles of the longest context the launch can meet.
        device_programs: programs the device runs at once.
    """
    most = min(MAX_SPLITS, max(num_tiles // _MIN_TILES_PER_SPLIT, 1))
    if num_programs >= 0.8 * device_programs:
        return 1

    def efficiency(splits: int) -> float:
        waves = num_programs * splits / device_programs
        return waves / max(-(-num_programs * splits // device_programs), 1)

    enough = 0.85 * max(efficiency(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if efficiency(splits) >= enough)


@functools.cache
def num_sms(device_index: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


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
