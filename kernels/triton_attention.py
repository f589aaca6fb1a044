"""Attention of query rows over a paged KV cache on a GPU: prompt chunks, plain decodes and token trees in one kernel.

The heads of a group share their keys, so (node, head of the group) are the rows of one tile. The context is split over
programs until they fill the device; a second kernel merges the splits by their log-sum-exp (Flash-Decoding, Dao et al.
2023; online softmax, FlashAttention-2, arXiv:2307.08691). The grid depends on shapes alone, never on device data, so a
launch can be captured in a CUDA graph and replayed with other lengths. Reference: `wingbeat.kernels.attention`.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 128
# Below this many tiles a split costs more in its partial result than it gains.
_MIN_TILES_PER_SPLIT = 2
_LOG2_E = tl.constexpr(1.4426950408889634)
# The running maximum starts finite, so that a row that has seen nothing yet yields weight 0 instead of inf - inf.
_LOWEST = tl.constexpr(-1.0e30)


class TileConfig(NamedTuple):
    """Launch parameters of the attention kernel."""

    block_rows: int
    """Query rows (group * nodes) of a tile."""
    block_keys: int
    """Keys per iteration; a power of two, at least 16."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs a multiprocessor holds at once by shared memory and registers; sizes the split of the context."""


# By (bytes of an element, padded head dim): one entry per tile height. From 64 rows on Hopper's wgmma applies, which
# works in groups of four warps and 64 rows; below, tiles are read faster than they are computed, and several programs
# share a multiprocessor. Of the stages, every second one prefetches keys and values: the block ids come first.
TILE_CONFIGS: dict[tuple[int, int], tuple[TileConfig, ...]] = {
    (2, 64): (
        TileConfig(16, 128, 4, 5, 3),
        TileConfig(32, 128, 4, 5, 3),
        TileConfig(64, 128, 4, 3, 2),
        TileConfig(128, 128, 8, 5, 1),
    ),
    (2, 128): (
        TileConfig(16, 64, 4, 5, 3),
        TileConfig(32, 64, 4, 5, 2),
        TileConfig(64, 64, 4, 3, 2),
        TileConfig(128, 64, 8, 5, 1),
    ),
    (2, 256): (
        TileConfig(16, 32, 4, 5, 2),
        TileConfig(32, 32, 4, 5, 2),
        TileConfig(64, 32, 4, 3, 1),
        TileConfig(128, 32, 8, 3, 1),
    ),
    (4, 64): (TileConfig(16, 32, 4, 3, 2), TileConfig(32, 32, 4, 3, 2), TileConfig(64, 32, 8, 3, 1)),
    (4, 128): (TileConfig(16, 32, 4, 3, 2), TileConfig(32, 32, 8, 3, 1)),
    (4, 256): (TileConfig(16, 16, 4, 3, 2), TileConfig(32, 16, 8, 3, 1)),
}


def tile_config(dtype: torch.dtype, head_dim: int, num_rows: int) -> TileConfig:
    """The smallest tile of the table that holds `num_rows` = group * num_query rows, else the largest.

    Args:
        dtype: of the query.
        head_dim: larger of key_dim and value_dim.
    """
    padded = max(64, triton.next_power_of_2(head_dim))
    configs = TILE_CONFIGS[dtype.itemsize, padded]
    return next((config for config in configs if config.block_rows >= num_rows), configs[-1])


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
def _num_sms(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def workspace_size(num_splits: int, num_reqs: int, num_query: int, num_heads: int, value_dim: int) -> int:
    """float32 elements a launch needs for the splits' partial results; 0 where there is one split."""
    return num_splits * num_reqs * num_query * num_heads * (value_dim + 1) if num_splits > 1 else 0


@triton.jit
def _tanh(x):
    # tanh(x) = 2 sigmoid(2 x) - 1; tl has no portable tanh.
    return 2.0 / (1.0 + tl.exp2(x * (-2.0 * _LOG2_E))) - 1.0


@triton.jit
def _attend_tile(
    acc,  # float32 [BLOCK_ROWS, BLOCK_VALUE_DIM]
    total,  # float32 [BLOCK_ROWS]
    peak,  # float32 [BLOCK_ROWS], in units of log2
    query,  # [BLOCK_ROWS, BLOCK_KEY_DIM]
    keys,  # int32 [BLOCK_KEYS]: index in the context
    visible,  # bool [BLOCK_ROWS, BLOCK_KEYS], or None where every row sees every key
    end,  # keys from it on are not read, unless WHOLE
    table_ptr,
    key_ptr,
    value_ptr,
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    logit_scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):
    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    if WHOLE:
        block = tl.load(table_ptr + keys // BLOCK_SIZE)
    else:
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)
    offset = keys % BLOCK_SIZE
    key_ptrs = key_ptr + (block * stride_key_block + offset * stride_key_slot)[:, None] + key_dims[None, :]
    value_ptrs = value_ptr + (block * stride_value_block + offset * stride_value_slot)[:, None] + value_dims[None, :]
    if WHOLE:
        if KEY_DIM == BLOCK_KEY_DIM:
            key = tl.load(key_ptrs)
        else:
            key = tl.load(key_ptrs, mask=key_dims[None, :] < KEY_DIM, other=0.0)
    else:
        key = tl.load(key_ptrs, mask=(keys < end)[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
    if softcap is None:
        scale = logit_scale * _LOG2_E
    else:
        scores = softcap * _tanh(scores * (logit_scale / softcap))
        scale = _LOG2_E
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    if WHOLE:
        if VALUE_DIM == BLOCK_VALUE_DIM:
            value = tl.load(value_ptrs)
        else:
            value = tl.load(value_ptrs, mask=value_dims[None, :] < VALUE_DIM, other=0.0)
    else:
        value = tl.load(value_ptrs, mask=(keys < end)[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc, input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def _visible_nodes(words_ptr, node, num_query, first, num_words, BLOCK_KEYS: tl.constexpr):
    """bool [BLOCK_ROWS, BLOCK_KEYS]: mask bits of the new keys from `first` on; negative ones are committed: visible.

    A tile of at most 64 keys begins anywhere in a word, so its bits are cut out of two neighbouring words.
    """
    word = first >> 6
    shift = (first & 63).to(tl.uint64)
    low = tl.load(words_ptr + word, mask=node < tl.where((word >= 0) & (word < num_words), num_query, 0), other=0)
    word += 1
    high = tl.load(words_ptr + word, mask=node < tl.where((word >= 0) & (word < num_words), num_query, 0), other=0)
    low = tl.where(word < 1, -1, low).to(tl.uint64, bitcast=True)
    high = tl.where(word < 0, -1, high).to(tl.uint64, bitcast=True)
    # Shifted in two steps: a shift by 64, as shift 0 would need, is undefined.
    bits = (low >> shift) | ((high << 1) << (63 - shift))
    column = tl.arange(0, BLOCK_KEYS).to(tl.uint64)
    return ((bits[:, None] >> column[None, :]) & 1) != 0


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "stride_position",
        "stride_word_req",
        "stride_word_node",
        "num_query",
        "num_new",
        "num_words",
        "max_keys",
        "num_row_tiles",
        "num_splits",
    ],
    # Rows of tables and batches begin anywhere: a variant compiled for each alignment would stall a round for seconds.
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "position_ptr", "words_ptr"],
)
def _tree_attention_kernel(
    query_ptr,  # [num_reqs, num_query, num_heads, KEY_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM]
    value_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM]
    table_ptr,  # int64 [num_reqs, width]
    context_ptr,  # int64 [num_reqs]
    position_ptr,  # int64 [num_reqs, num_new], or None: causal, or without a window
    words_ptr,  # int64 [num_reqs, num_query, num_words], or None: causal
    sink_ptr,  # [num_heads], or None
    key_scale_ptr,  # float32 [NUM_KV_HEADS], or None
    value_scale_ptr,  # float32 [NUM_KV_HEADS], or None
    out_ptr,  # [num_reqs, num_query, num_heads, VALUE_DIM]; float32 partial results where SPLIT
    lse_ptr,  # float32 [num_splits, num_reqs, num_query, num_heads], in units of log2; None without SPLIT
    stride_query_req,
    stride_query_node,
    stride_query_head,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_table,
    stride_position,
    stride_word_req,
    stride_word_node,
    stride_out_split,
    stride_out_req,
    stride_out_node,
    stride_out_head,
    logit_scale,
    softcap,  # or None
    window,  # or None
    num_query,
    num_new,  # num_query where causal
    num_words,
    max_keys,  # width * BLOCK_SIZE
    num_row_tiles,
    num_splits,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TAIL_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Row tiles of one head follow one another: those after the first find its keys in the L2 cache.
    row_tile = tl.program_id(0) % num_row_tiles
    kv_head = tl.program_id(0) // num_row_tiles % NUM_KV_HEADS
    req = (tl.program_id(0) // num_row_tiles // NUM_KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    if words_ptr is None:
        # The last rows of a chunk see most keys: they start first.
        row_tile = num_row_tiles - 1 - row_tile
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = node < num_query

    context = tl.load(context_ptr + req).to(tl.int32)
    table_ptr += req * stride_table
    if words_ptr is None:
        first_node = row_tile * BLOCK_ROWS // GROUP
        last_node = tl.minimum((row_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_query - 1)
        end = tl.minimum(context + last_node + 1, max_keys)
        shared = tl.minimum(context + first_node + 1, end)  # keys before it are visible to every row
        position = context + node
    else:
        end = tl.minimum(context + num_new, max_keys)
        shared = tl.minimum(context, end)
        words_ptr += req * stride_word_req + node * stride_word_node
        if window is not None:
            position_ptr += req * stride_position
            position = tl.load(position_ptr + num_new - num_query + node, mask=live, other=0).to(tl.int32)
    begin = 0
    if window is not None:
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        # Of the new keys, the position is not the index: a window can skip committed ones only.
        begin = tl.minimum(tl.maximum(oldest, 0), shared) // BLOCK_KEYS * BLOCK_KEYS
    per_split = tl.cdiv(tl.cdiv(end - begin, BLOCK_KEYS), num_splits) * BLOCK_KEYS
    low = begin + split * per_split
    high = tl.minimum(low + per_split, end)
    bare = shared // BLOCK_KEYS * BLOCK_KEYS  # tiles before it need no mask

    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    query_ptrs = query_ptr + req * stride_query_req + (node * stride_query_node + head * stride_query_head)[:, None]
    query = tl.load(query_ptrs + key_dims[None, :], mask=live[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    key_ptr += kv_head * stride_key_head
    value_ptr += kv_head * stride_value_head
    if key_scale_ptr is not None:
        logit_scale = logit_scale * tl.load(key_scale_ptr + kv_head)

    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_DIM], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    peak = tl.full([BLOCK_ROWS], _LOWEST, tl.float32)
    if sink_ptr is not None:  # noqa: SIM102
        # An extra key without a value: counted once, in the first split.
        if split == 0:
            peak = tl.load(sink_ptr + head, mask=live, other=0.0).to(tl.float32) * _LOG2_E
            total = tl.full([BLOCK_ROWS], 1.0, tl.float32)

    for start in tl.range(low, tl.minimum(high, bare), BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        if window is None:
            visible = None
        else:
            visible = position[:, None] - keys[None, :] < window
        acc, total, peak = _attend_tile(
            acc,
            total,
            peak,
            query,
            keys,
            visible,
            high,
            table_ptr,
            key_ptr,
            value_ptr,
            stride_key_block,
            stride_key_slot,
            stride_value_block,
            stride_value_slot,
            logit_scale,
            softcap,
            BLOCK_SIZE,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_KEY_DIM,
            BLOCK_VALUE_DIM,
            PRECISION,
            True,
        )
    for start in tl.range(tl.maximum(low, bare), high, TAIL_KEYS, num_stages=1):
        keys = start + tl.arange(0, TAIL_KEYS)
        if words_ptr is None:
            visible = keys[None, :] <= position[:, None]
        else:
            visible = _visible_nodes(words_ptr, node, num_query, start - context, num_words, TAIL_KEYS)
        visible = visible & (keys < high)[None, :]
        if window is not None:
            if words_ptr is None:
                key_position = keys
            else:
                new = keys - context
                loaded = tl.load(position_ptr + new, mask=(new >= 0) & (new < num_new), other=0).to(tl.int32)
                key_position = tl.where(new < 0, keys, loaded)
            visible = visible & (position[:, None] - key_position[None, :] < window)
        acc, total, peak = _attend_tile(
            acc,
            total,
            peak,
            query,
            keys,
            visible,
            high,
            table_ptr,
            key_ptr,
            value_ptr,
            stride_key_block,
            stride_key_slot,
            stride_value_block,
            stride_value_slot,
            logit_scale,
            softcap,
            BLOCK_SIZE,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_KEY_DIM,
            BLOCK_VALUE_DIM,
            PRECISION,
            False,
        )

    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    if value_scale_ptr is not None:
        acc = acc * tl.load(value_scale_ptr + kv_head)
    out_ptrs = out_ptr + req * stride_out_req + (node * stride_out_node + head * stride_out_head).to(tl.int64)
    stored = live
    if SPLIT:
        # A split that a row sees nothing of is not written; its log-sum-exp says so to the merge.
        lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        row = (split.to(tl.int64) * (tl.num_programs(0) // num_row_tiles // NUM_KV_HEADS) + req) * num_query + node
        tl.store(lse_ptr + row * (NUM_KV_HEADS * GROUP) + head, lse, mask=live)
        out_ptrs += split.to(tl.int64) * stride_out_split
        stored = live & seen
    tl.store(
        out_ptrs[:, None] + value_dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=stored[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_query", "num_splits", "stride_split"])
def _merge_splits_kernel(
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
    peak = tl.maximum(tl.max(all_lse, 0), _LOWEST)
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


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    positions: Tensor | None,
    mask_words: Tensor | None,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    config: TileConfig | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """See `wingbeat.kernels.attention.tree_attention`, which checks the arguments.

    Args:
        workspace: float32, `workspace_size` elements or more; allocated where None.
        config: overrides the table of tile configurations.
        num_splits: overrides `choose_num_splits`, at most MAX_SPLITS.
    """
    num_reqs, num_query, num_heads, key_dim = query.shape
    block_size, num_kv_heads, value_dim = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    group = num_heads // num_kv_heads
    config = config or tile_config(query.dtype, max(key_dim, value_dim), group * num_query)
    num_row_tiles = triton.cdiv(group * num_query, config.block_rows)
    num_programs = num_row_tiles * num_kv_heads * num_reqs
    max_keys = block_tables.shape[1] * block_size
    if num_splits is None:
        device_programs = (_num_sms(query.device.index or 0) if query.is_cuda else 1) * config.programs_per_sm
        num_splits = choose_num_splits(num_programs, triton.cdiv(max_keys, config.block_keys), device_programs)
    if out is None:
        out = query.new_empty(num_reqs, num_query, num_heads, value_dim)
    if num_programs == 0:
        return out
    if query.stride(3) != 1:
        query = query.contiguous()
    split = num_splits > 1
    target, lse = out, None
    if split:
        needed = workspace_size(num_splits, num_reqs, num_query, num_heads, value_dim)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
        elif workspace.dtype != torch.float32 or workspace.numel() < needed:
            raise ValueError(f"workspace is {workspace.numel()} x {workspace.dtype}: {needed} x torch.float32 needed")
        rows = num_splits * num_reqs * num_query * num_heads
        flat = workspace.view(-1)
        target = flat[: rows * value_dim].view(num_splits, num_reqs, num_query, num_heads, value_dim)
        lse = flat[rows * value_dim : needed]
    causal = mask_words is None
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(query):
        _tree_attention_kernel[(num_programs, num_splits)](
            query,
            key_cache,
            value_cache,
            block_tables,
            num_context,
            None if causal or sliding_window is None else positions,
            mask_words,
            sinks,
            key_scale,
            value_scale,
            target,
            lse,
            *query.stride()[:3],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            block_tables.stride(0),
            0 if causal else positions.stride(0),
            *((0, 0) if causal else mask_words.stride()[:2]),
            target.stride(0) if split else 0,
            *target.stride()[-4:-1],
            float(scaling),
            None if softcap is None else float(softcap),
            sliding_window,
            num_query,
            num_query if causal else positions.shape[1],
            0 if causal else mask_words.shape[2],
            max_keys,
            num_row_tiles,
            num_splits,
            SPLIT=split,
            GROUP=group,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_KEY_DIM=max(16, triton.next_power_of_2(key_dim)),
            BLOCK_VALUE_DIM=max(16, triton.next_power_of_2(value_dim)),
            BLOCK_ROWS=config.block_rows,
            BLOCK_KEYS=config.block_keys,
            TAIL_KEYS=min(config.block_keys, 64),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if split:
            _merge_splits_kernel[(num_reqs * num_query, num_heads)](
                target,
                lse,
                out,
                num_reqs * num_query * num_heads,
                *out.stride()[:3],
                num_query,
                num_splits,
                NUM_HEADS=num_heads,
                VALUE_DIM=value_dim,
                BLOCK_VALUE_DIM=triton.next_power_of_2(value_dim),
                ALL_SPLITS=MAX_SPLITS,
                BLOCK_SPLITS=16,
                num_warps=4,
            )
    return out
