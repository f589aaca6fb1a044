"""Splits of the context over programs: their length, assignment, partial results and merge."""

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from wingbeat.kernels.gpu.attention.tiles import TileConfig
from wingbeat.kernels.launching import wait_for_launch

MAX_SPLITS = 128
# Minimum number of tiles of a split: writing the partial result of a smaller split costs more time than the split
# saves.
_MIN_TILES_PER_SPLIT = 2
# Number of keys of a split if the requests' first splits fill the device by themselves; only contexts much longer than
# the others are then split further. If the first splits fill a fraction of the device, this number is multiplied by the
# fraction. Tuned on an H100.
_KEYS_OF_A_FULL_DEVICE = 2048
# Rows of a tile above which splits are longer if the first splits fill the device more than once: writing and merging
# the results of 128 rows takes about a tenth of the time of 2048 keys.
_LOW_ROWS = 64
# Number of programs for further splits, as a multiple of the number that fills the device. With fewer programs, most of
# the device waits while the last programs run; with more programs, many programs have no work when requests are short.
_DEVICES = 4
# Maximum bytes of the splits' results in one launch. Batches of many rows, whose first splits fill the device by
# themselves, therefore have few splits or none.
MOST_BYTES = 256 << 20
# Number of programs of a merge. All of them are launched; programs whose requests are not split return at once. A merge
# takes 2.7 us in a layer of a plain step on an H100. The last program of a tile could merge without a launch, but alone
# it would read the results of all splits of the tile: 700 KB for 32 rows with 43 splits, an estimated 10 us.
_MERGING = 4096
# The running maximum starts finite, so that a row that has seen no key yields weight 0 instead of inf - inf.
LOWEST = tl.constexpr(-1.0e30)
# Number of request lengths that a program reads at once.
_BLOCK_REQS = tl.constexpr(256)


class Splits(NamedTuple):
    """Split lengths in launches of one batch size; a request's splits depend on its own length only."""

    most: int
    """Maximum number of splits of one request, at most MAX_SPLITS."""
    least_keys: int
    """Minimum number of keys of a split except the last, a multiple of the tile's block_keys. Therefore shorter
    requests have fewer splits."""

    def at_most(self, max_keys: int) -> int:
        """Maximum number of splits of a request of at most `max_keys` keys."""
        return max(min(self.most, -(-max_keys // self.least_keys)), 1)

    def launched(self, num_reqs: int, max_keys: int, filling: int) -> int:
        """Number of programs per row tile and head, for requests of at most `max_keys` keys.

        One program per request runs the request's first split; the other programs share the further splits. The number
        depends on shapes alone, as a captured launch requires. The number is limited, because with a program for each
        split that the longest table allows, nearly all programs of a large batch would have no work.

        Args:
            filling: splits of one request that fill the device.
        """
        return num_reqs + min(num_reqs * (self.at_most(max_keys) - 1), _DEVICES * filling)


FIXED_SPLITS = Splits(512, 512)
"""Splits for rows that must have the same bits in any batch and with any table. The splits are short enough for a
single request to use the device, and long enough for a large batch."""


def choose_splits(
    num_reqs: int, num_programs: int, device_programs: int, tile: TileConfig, split_bytes: int = 0
) -> Splits:
    """Chooses splits that fill the device, both with a single long request and with a large batch, and whose results
    take at most MOST_BYTES.

    Args:
        num_reqs: requests of the launch, rounded up to a power of two, because captured rounds contain padding.
        num_programs: programs of one request without splitting: KV heads * row tiles.
        device_programs: programs that the device runs at once.
        tile: tile of rows and keys.
        split_bytes: bytes of the result of one split of one request.
    """
    num_reqs = triton.next_power_of_2(num_reqs)
    filled = min(num_reqs * num_programs / device_programs, max(tile.block_rows / _LOW_ROWS, 1.0))
    tiles = max(round(_KEYS_OF_A_FULL_DEVICE * filled / tile.block_keys), _MIN_TILES_PER_SPLIT)
    held = MOST_BYTES // max(num_reqs * split_bytes, 1)
    return Splits(max(min(choose_num_splits(num_programs, device_programs), held), 1), tiles * tile.block_keys)


def merged_heads(num_rows: int, num_heads: int) -> int:
    """Number of heads of a row that one program merges, in sequence."""
    return min(max(num_rows * num_heads // _MERGING, 1), num_heads)


@functools.lru_cache(maxsize=1024)
def choose_num_splits(num_programs: int, device_programs: int) -> int:
    """Smallest number of splits of the context that reaches 85 % of the best efficiency.

    Programs run in waves that fill the device; the efficiency is the share of the device that the waves use.

    Args:
        num_programs: programs without splitting.
        device_programs: programs that the device runs at once.
    """
    if num_programs >= 0.8 * device_programs:
        return 1

    def efficiency(splits: int) -> float:
        waves = num_programs * splits / device_programs
        return waves / max(-(-num_programs * splits // device_programs), 1)

    enough = 0.85 * max(efficiency(splits) for splits in range(1, MAX_SPLITS + 1))
    return next(splits for splits in range(1, MAX_SPLITS + 1) if efficiency(splits) >= enough)


def split_size(num_query: int, num_heads: int, value_dim: int) -> int:
    """float32 elements of the result of one split of one request."""
    return num_query * num_heads * (value_dim + 1)


def workspace_size(num_splits: int, num_reqs: int, num_query: int, num_heads: int, value_dim: int) -> int:
    """float32 elements that a launch needs for the splits' partial results; 0 with a single split."""
    return num_splits * num_reqs * split_size(num_query, num_heads, value_dim) if num_splits > 1 else 0


@triton.jit
def split_keys(context, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS: tl.constexpr):
    """Returns the keys of a split and the number of splits, for a request or a vector of requests.

    Both depend on the request's own length only, so the summation order of a row is independent of other lengths, of
    the table and of the graph.
    """
    length = context + num_new
    if window is not None:
        length = tl.minimum(length, window + num_new + BLOCK_KEYS)
    keys = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_KEYS), most_splits) * BLOCK_KEYS, least_keys)
    return keys, tl.cdiv(tl.minimum(length, max_keys), keys)


@triton.jit
def _further_splits(
    first, context_ptr, num_reqs, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS: tl.constexpr
):
    """int32 [_BLOCK_REQS]: number of splits besides the first, for the requests that begin at index `first`; 0 past the
    last request.
    """
    reqs = first + tl.arange(0, _BLOCK_REQS)
    context = tl.load(context_ptr + reqs, mask=reqs < num_reqs, other=0).to(tl.int32)
    _, num_splits = split_keys(context, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS)
    # Requests whose rows lie before the beginning of a sequence have no split.
    return tl.where(reqs < num_reqs, tl.maximum(num_splits - 1, 0), 0)


@triton.jit
def count_further_splits(
    context_ptr,  # int64 [num_reqs]
    num_reqs,
    num_new,
    window,
    max_keys,
    most_splits,
    least_keys,
    BLOCK_KEYS: tl.constexpr,
):
    """Number of splits of all requests, not counting each request's first."""
    total = 0
    for first in tl.range(0, num_reqs, _BLOCK_REQS, num_stages=1):
        total += tl.sum(
            _further_splits(
                first, context_ptr, num_reqs, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS
            ),
            0,
        )
    return total


@triton.jit
def find_further_split(
    item,  # below `count_further_splits`; items are ordered by request
    context_ptr,  # int64 [num_reqs]
    num_reqs,
    num_new,
    window,
    max_keys,
    most_splits,
    least_keys,
    BLOCK_KEYS: tl.constexpr,
):
    """Returns the request that an item belongs to, and the index of the split in that request, at least 1."""
    req = 0
    for first in tl.range(0, num_reqs, _BLOCK_REQS, num_stages=1):
        ends = tl.cumsum(
            _further_splits(
                first, context_ptr, num_reqs, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS
            ),
            0,
        )
        # Skip the requests of this block whose last split comes before the item. Once the item's request is found,
        # `req` differs from `first`, and later blocks skip nothing.
        before = (ends <= item) & (req == first)
        req += tl.sum(before.to(tl.int32), 0)
        item -= tl.max(tl.where(before, ends, 0), 0)
    return req, item + 1


@triton.jit(
    do_not_specialize=["stride_split", "num_query", "num_new", "max_keys", "most_splits", "least_keys", "num_merged"],
    do_not_specialize_on_alignment=["context_ptr"],
)
def merge_splits_kernel(
    partial_ptr,  # float32 [num_splits, num_reqs, num_query, num_heads, VALUE_DIM]
    lse_ptr,  # float32 [num_splits, num_reqs, num_query, num_heads]
    out_ptr,  # [num_reqs, num_query, num_heads, VALUE_DIM]
    context_ptr,  # int64 [num_reqs]
    stride_split,  # elements of `lse_ptr` from one split to the next
    stride_out_req,
    stride_out_node,
    stride_out_head,
    window,  # this and the next five as in `kernel.tree_attention_kernel`
    num_query,
    num_new,
    max_keys,
    most_splits,
    least_keys,
    num_merged,  # number of heads that a program merges
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merges the splits of requests that have several splits. For other requests the attention kernel has already
    written the result.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    context = tl.load(context_ptr + row // num_query).to(tl.int32)
    _, num_splits = split_keys(context, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS)
    if num_splits > 1:
        dims = tl.arange(0, BLOCK_VALUE_DIM)
        every = tl.arange(0, ALL_SPLITS)
        first_head = tl.program_id(1) * num_merged
        for head in tl.range(first_head, tl.minimum(first_head + num_merged, NUM_HEADS), num_stages=1):
            cell = row * NUM_HEADS + head
            all_lse = tl.load(
                lse_ptr + every.to(tl.int64) * stride_split + cell, mask=every < num_splits, other=float("-inf")
            )
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
            # if a row sees keys in a single split, its result keeps the bits of that split's result
            acc = tl.div_rn(acc, tl.where(total > 0, total, 1.0))
            out_ptrs = out_ptr + row // num_query * stride_out_req + row % num_query * stride_out_node
            out_ptrs += head * stride_out_head
            tl.store(out_ptrs + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
