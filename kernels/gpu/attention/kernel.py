"""The attention kernel: assigns tiles of query rows and splits of the requests' keys to programs.

`launch` launches it. The number of splits in a batch depends on the requests' lengths; the number of programs that
share the splits depends on shapes alone. Each request's first split has a program of its own, which suffices for a
request that is not split. The other programs locate the further splits by scanning the lengths.
"""

import triton
import triton.language as tl

from wingbeat.kernels.gpu.attention.rows import attend_rows
from wingbeat.kernels.gpu.attention.splits import count_further_splits, find_further_split
from wingbeat.kernels.launching import wait_for_launch


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "stride_position",
        "stride_word_req",
        "stride_word_node",
        "num_reqs",
        "num_query",
        "num_new",
        "num_words",
        "max_keys",
        "num_row_tiles",
        "most_splits",
        "least_keys",
    ],
    # Tables and batches may begin at any address. Without the next option Triton would compile a variant for each
    # alignment, and the compilation would stall a round for seconds.
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "position_ptr", "words_ptr", "lse_ptr"],
)
def tree_attention_kernel(
    query_ptr,  # [num_reqs, num_query, num_heads, KEY_DIM + REST_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM + REST_DIM]
    # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM]; with REST_DIM, the values are the keys' first elements
    value_ptr,
    table_ptr,  # int64 [num_reqs, width]
    context_ptr,  # int64 [num_reqs]
    position_ptr,  # int64 [num_reqs, num_new]; None if causal or without a window
    words_ptr,  # int64 [num_reqs, num_query, num_words]; None if causal
    sink_ptr,  # [num_heads], or None
    out_ptr,  # [num_reqs, num_query, num_heads, VALUE_DIM]: results of requests with one split
    # float32 [num_splits, num_reqs, num_query, num_heads, VALUE_DIM]: results of splits; None without SPLIT
    partial_ptr,
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
    stride_out_req,
    stride_out_node,
    stride_out_head,
    logit_scale,
    softcap,  # or None
    window,  # or None
    num_reqs,
    num_query,
    num_new,  # num_query if causal
    num_words,
    max_keys,  # width * BLOCK_SIZE
    num_row_tiles,
    most_splits,  # maximum number of splits of a request
    least_keys,  # minimum number of keys of a split, a multiple of BLOCK_KEYS
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,  # 0, or the number of elements of a key past its value
    BLOCK_REST_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TAIL_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIKE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    of_split = num_row_tiles * NUM_KV_HEADS
    unit = tl.program_id(0)  # index over splits (outermost), heads and row tiles
    num_first = of_split * num_reqs
    end = unit + 1
    if SPLIT:
        split_window = None if ALIKE else window
        if unit >= num_first:
            end = num_first + of_split * count_further_splits(
                context_ptr, num_reqs, num_new, split_window, max_keys, most_splits, least_keys, BLOCK_KEYS
            )
        step = tl.maximum(tl.num_programs(0) - num_first, 1)
    else:
        step = 1
    # `disable_licm` makes each iteration recompute values that do not change, because keeping them takes a third more
    # registers.
    for at in tl.range(unit, end, step, num_stages=1, disable_licm=True):
        req = at // of_split
        split = 0
        if SPLIT:  # noqa: SIM102
            if at >= num_first:
                req, split = find_further_split(
                    req - num_reqs, context_ptr, num_reqs, num_new, split_window, max_keys, most_splits, least_keys,
                    BLOCK_KEYS,
                )  # fmt: skip
        attend_rows(
            at, req, split, num_reqs, query_ptr, key_ptr, value_ptr, table_ptr, context_ptr, position_ptr,
            words_ptr, sink_ptr, out_ptr, partial_ptr, lse_ptr, stride_query_req, stride_query_node,
            stride_query_head, stride_key_block, stride_key_slot, stride_key_head, stride_value_block,
            stride_value_slot, stride_value_head, stride_table, stride_position, stride_word_req,
            stride_word_node, stride_out_req, stride_out_node, stride_out_head, logit_scale, softcap, window,
            num_query, num_new, num_words, max_keys, num_row_tiles, most_splits, least_keys, SPLIT, GROUP,
            NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, BLOCK_KEY_DIM, BLOCK_VALUE_DIM, REST_DIM, BLOCK_REST_DIM,
            BLOCK_ROWS, BLOCK_KEYS, TAIL_KEYS, PRECISION, ALIKE,
        )  # fmt: skip
