"""Attention of a tile of query rows over the keys of one split; called by the programs of `kernel`.

The heads of a group share their keys, so each pair (node, head of the group) is a row of one tile. Tiles of committed
keys need no mask; among new keys, mask words or the row order determine the visible ones (online softmax,
FlashAttention-2, arXiv:2307.08691).
"""

import triton
import triton.language as tl

from wingbeat.kernels.gpu.attention.splits import LOWEST, split_keys

_LOG2_E = tl.constexpr(1.4426950408889634)


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
    # [BLOCK_ROWS, BLOCK_REST_DIM]: elements of the query past KEY_DIM, if a key's first KEY_DIM elements are its value;
    # else None
    query_rest,
    keys,  # int32 [BLOCK_KEYS]: indices in the request's sequence
    visible,  # bool [BLOCK_ROWS, BLOCK_KEYS]; None if every row sees every key
    end,  # keys from here on are not read, unless WHOLE
    cache,  # the table, keys and values, and the strides of their blocks and slots
    logit_scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_REST_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):
    table_ptr, key_ptr, value_ptr, stride_key_block, stride_key_slot, stride_value_block, stride_value_slot = cache
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
    if query_rest is not None:
        rest_dims = KEY_DIM + tl.arange(0, BLOCK_REST_DIM)
        rest_ptrs = key_ptr + (block * stride_key_block + offset * stride_key_slot)[:, None] + rest_dims[None, :]
        seen = (rest_dims < KEY_DIM + REST_DIM)[None, :]
        if not WHOLE:
            seen = seen & (keys < end)[:, None]
        rest = tl.load(rest_ptrs, mask=seen, other=0.0)
        scores = tl.dot(query_rest, tl.trans(rest.to(query.dtype)), scores, input_precision=PRECISION)
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
    if query_rest is not None:
        value = key
    elif WHOLE:
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
    """bool [BLOCK_ROWS, BLOCK_KEYS]: mask bits of the new keys that begin at index `first`.

    Keys before new key 0 are committed, hence visible.

    A tile of at most 64 keys may begin within a word, so its bits are combined from two neighbouring words.
    """
    word = first >> 6
    shift = (first & 63).to(tl.uint64)
    low = tl.load(words_ptr + word, mask=node < tl.where((word >= 0) & (word < num_words), num_query, 0), other=0)
    word += 1
    high = tl.load(words_ptr + word, mask=node < tl.where((word >= 0) & (word < num_words), num_query, 0), other=0)
    low = tl.where(word < 1, -1, low).to(tl.uint64, bitcast=True)
    high = tl.where(word < 0, -1, high).to(tl.uint64, bitcast=True)
    # The word is shifted in two steps, because a single step would be a shift by 64 if `shift` is 0, which is
    # undefined.
    bits = (low >> shift) | ((high << 1) << (63 - shift))
    column = tl.arange(0, BLOCK_KEYS).to(tl.uint64)
    return ((bits[:, None] >> column[None, :]) & 1) != 0


@triton.jit
def _bits_of(word):
    """int32 [64]: the bits of a word."""
    return ((word >> tl.arange(0, 64).to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def _places_of_path(
    word,  # int64: mask of a node's path among the new rows, itself included
    keys,  # int32 [BLOCK_KEYS]: positions
    context,
    end,
):
    """int32 [BLOCK_KEYS]: storage index of the keys at some positions of a path.

    `end` for positions after the path.
    """
    bits = _bits_of(word)
    depths = tl.cumsum(bits, 0) - 1  # parents precede their children
    found = (bits != 0)[None, :] & (depths[None, :] == (keys - context)[:, None])
    nodes = tl.sum(tl.where(found, tl.arange(0, 64)[None, :], 0), 1)
    known = tl.sum(found.to(tl.int32), 1) > 0
    return tl.where(keys < context, keys, tl.where(known, context + nodes, end))


@triton.jit
def _store_rows(
    out_ptr,
    offsets,  # int64 [BLOCK_ROWS]
    rows,  # float32 [BLOCK_ROWS, BLOCK_VALUE_DIM]
    stored,  # bool [BLOCK_ROWS]
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    mask = stored[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out_ptr + offsets[:, None] + dims[None, :], rows.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend_rows(
    unit,  # index over row tiles (innermost), heads and requests
    req,
    split,  # 0 unless SPLIT
    num_reqs,
    query_ptr,  # from here on as in `kernel.tree_attention_kernel`
    key_ptr,
    value_ptr,
    table_ptr,
    context_ptr,
    position_ptr,
    words_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
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
    softcap,
    window,
    num_query,
    num_new,
    num_words,
    max_keys,
    num_row_tiles,
    most_splits,
    least_keys,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_REST_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TAIL_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIKE: tl.constexpr,
):
    """Writes the results of one tile.

    If the request has several splits, the results and their log-sum-exp are written to the partial results.

    ALIKE visits a node's keys in the order of their positions on the node's path. A node's row therefore has the same
    bits in a tree as in a later round in which the node's token is the root.
    """
    # Row tiles after the first find their head's keys in the L2 cache.
    row_tile = unit % num_row_tiles
    kv_head = unit // num_row_tiles % NUM_KV_HEADS
    req = req.to(tl.int64)
    if words_ptr is None:
        # The last rows of a chunk see the most keys, so they start first.
        row_tile = num_row_tiles - 1 - row_tile
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = node < num_query

    context = tl.load(context_ptr + req).to(tl.int32)
    table_ptr += req * stride_table
    first_node = row_tile * BLOCK_ROWS // GROUP
    last_node = tl.minimum((row_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_query - 1)
    if words_ptr is None:
        end = tl.minimum(context + last_node + 1, max_keys)
        shared = tl.minimum(context + first_node + 1, end)  # keys before `shared` are visible to every row
        position = context + node
    else:
        end = tl.minimum(context + num_new, max_keys)
        shared = tl.minimum(context, end)
        words_ptr += req * stride_word_req
        if window is not None:
            position_ptr += req * stride_position
            position = tl.load(position_ptr + num_new - num_query + node, mask=live, other=0).to(tl.int32)
    begin = 0
    if window is not None:
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        # The positions of new keys differ from their indices, so only committed keys before the window can be skipped
        # here.
        begin = tl.minimum(tl.maximum(oldest, 0), shared) // BLOCK_KEYS * BLOCK_KEYS
    low = begin
    high = end
    if SPLIT:
        per_split, num_splits = split_keys(
            context, num_new, None if ALIKE else window, max_keys, most_splits, least_keys, BLOCK_KEYS
        )
        # Splits are counted for the request. A tile that sees fewer keys, because of a window or of the tile's position
        # in a chunk, may have splits without keys.
        if ALIKE:
            low = split * per_split
            high = tl.minimum(low + per_split, end)
            high = tl.where(high <= begin, low, high)
        else:
            low = begin + split * per_split
            high = tl.minimum(low + per_split, end)
    bare = shared // BLOCK_KEYS * BLOCK_KEYS  # tiles before `bare` need no mask

    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    query_ptrs = query_ptr + req * stride_query_req + (node * stride_query_node + head * stride_query_head)[:, None]
    query = tl.load(query_ptrs + key_dims[None, :], mask=live[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    if REST_DIM:
        rest_dims = tl.arange(0, BLOCK_REST_DIM)
        seen = live[:, None] & (rest_dims < REST_DIM)[None, :]
        query_rest = tl.load(query_ptrs + KEY_DIM + rest_dims[None, :], mask=seen, other=0.0)
    else:
        query_rest = None
    key_ptr += kv_head * stride_key_head
    value_ptr += kv_head * stride_value_head
    cache = (table_ptr, key_ptr, value_ptr, stride_key_block, stride_key_slot, stride_value_block, stride_value_slot)

    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_DIM], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    peak = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    if sink_ptr is not None:  # noqa: SIM102
        # The sink is an extra key without a value, counted once, in the first split.
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
            acc, total, peak, query, query_rest, keys, visible, high, cache, logit_scale, softcap, BLOCK_SIZE, KEY_DIM,
            VALUE_DIM, BLOCK_KEY_DIM, BLOCK_VALUE_DIM, REST_DIM, BLOCK_REST_DIM, PRECISION, True,
        )  # fmt: skip
    tail = tl.maximum(low, bare)
    if ALIKE and words_ptr is not None:
        # Each node of the tile in turn reads its keys in the order of its path; rows of other nodes do not see these
        # keys.
        for own in tl.range(first_node, last_node + 1, num_stages=1):
            word = tl.load(words_ptr + own * stride_word_node)
            own_end = context + tl.sum(_bits_of(word), 0)
            for start in tl.range(tail, tl.minimum(high, own_end), TAIL_KEYS, num_stages=1):
                keys = start + tl.arange(0, TAIL_KEYS)
                places = _places_of_path(word, keys, context, end)
                visible = (node == own)[:, None] & ((keys < high) & (places < end))[None, :]
                if window is not None:
                    visible = visible & (own_end - 1 - keys < window)[None, :]
                acc, total, peak = _attend_tile(
                    acc, total, peak, query, query_rest, places, visible, end, cache, logit_scale, softcap, BLOCK_SIZE,
                    KEY_DIM, VALUE_DIM, BLOCK_KEY_DIM, BLOCK_VALUE_DIM, REST_DIM, BLOCK_REST_DIM, PRECISION, False,
                )  # fmt: skip
    else:
        for start in tl.range(tail, high, TAIL_KEYS, num_stages=1):
            keys = start + tl.arange(0, TAIL_KEYS)
            if words_ptr is None:
                visible = keys[None, :] <= position[:, None]
            else:
                visible = _visible_nodes(
                    words_ptr + node * stride_word_node, node, num_query, start - context, num_words, TAIL_KEYS
                )
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
                acc, total, peak, query, query_rest, keys, visible, high, cache, logit_scale, softcap, BLOCK_SIZE,
                KEY_DIM, VALUE_DIM, BLOCK_KEY_DIM, BLOCK_VALUE_DIM, REST_DIM, BLOCK_REST_DIM, PRECISION, False,
            )  # fmt: skip

    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    out_rows = req * stride_out_req + (node * stride_out_node + head * stride_out_head).to(tl.int64)
    if SPLIT:
        if num_splits > 1:
            # If a row sees no key of a split, no result is written; a log-sum-exp of -inf marks the gap for the merge.
            lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
            cell = ((split.to(tl.int64) * num_reqs + req) * num_query + node) * (NUM_KV_HEADS * GROUP) + head
            tl.store(lse_ptr + cell, lse, mask=live)
            _store_rows(partial_ptr, cell * VALUE_DIM, acc, live & seen, VALUE_DIM, BLOCK_VALUE_DIM)
        else:
            _store_rows(out_ptr, out_rows, acc, live, VALUE_DIM, BLOCK_VALUE_DIM)
    else:
        _store_rows(out_ptr, out_rows, acc, live, VALUE_DIM, BLOCK_VALUE_DIM)
