"""Queries, keys and values of a draft head's rows on a GPU, from token ids and features; the reference is
`kernels.few_rows.embedded`.

A program sums the columns of one attention head over a part of the embeddings or of the features. The last program of a
head adds the sums in input order, divides them by the rows' root mean squares, rotates and stores the head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.kv import stored_as
from wingbeat.kernels.gpu.layer import check, check_pairs, check_weights, normed_halves, turned_halves
from wingbeat.kernels.gpu.products import LEAST_HEIGHT, limits_of, part_of_sum, read_ahead, shares
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.layer.draft_rows import Pairs, Projection, Stored


@triton.jit
def _sum_of_splits(
    low_ptrs,  # [ROWS, BLOCK_HALF]: sums of the first half of a head, of the first split
    high_offset,  # from a head's first half to its second
    square_ptrs,  # [ROWS]
    first,
    last,
    split_size,
    size,
    eps,
    there,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Adds the sums of the splits from `first` to `last`; returns the normalised sums of a head's two halves, and the
    rows' factors.
    """
    low = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
    high = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for split in tl.range(first, last):
        at = low_ptrs + split * split_size
        low += tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        high += tl.load(at + high_offset, mask=there, other=0.0, cache_modifier=".cg")
        squares += tl.load(square_ptrs + split * ROWS, cache_modifier=".cg")
    scale = tl.math.rsqrt(squares / size + eps)
    return low * scale[:, None], high * scale[:, None], scale


@triton.jit(
    do_not_specialize=["num_rows", "steps", "width", "num_nodes"],
    do_not_specialize_on_alignment=["slot_ptr", "cos_ptr", "sin_ptr"],
)
def _embed_to_heads_kernel(
    id_ptr,  # int64 [num_rows]
    table_ptr,  # [vocab_size, size]
    feature_ptr,  # [num_rows, size], or with parents [num_rows / width * num_nodes, size]
    parent_ptr,  # int64 [num_rows], or None
    weight_ptr,  # [NUM_ALL * 2 * HALF, 2 * size]
    bias_ptr,  # [NUM_ALL * 2 * HALF], or None
    embed_norm_ptr,  # [size]; `feature_norm_ptr` likewise
    feature_norm_ptr,
    query_norm_ptr,  # [2 * HALF], or None
    key_norm_ptr,  # [2 * HALF], or None
    cos_ptr,  # [num_rows, 2 * HALF]; `sin_ptr` likewise
    sin_ptr,
    slot_ptr,  # int64 [num_rows]
    sums_ptr,  # float32 [splits, NUM_ALL * 2 * HALF, ROWS]
    squares_ptr,  # float32 [NUM_ALL, splits, ROWS]
    counters_ptr,  # int32 [NUM_ALL]
    query_ptr,  # [num_rows, NUM_HEADS, 2 * HALF]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF]; `value_cache_ptr` likewise
    value_cache_ptr,
    kept_ptr,  # [num_rows, size]: features, normalised if NORMED; or None
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    num_rows,
    width,
    num_nodes,
    size,
    steps,  # number of steps of a program, of IN inputs each
    eps,
    head_eps,
    NORMED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    head, split = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(1)
    of_half = splits // 2
    is_embedding = split < of_half
    row = tl.arange(0, ROWS)
    live = row < num_rows
    source = row.to(tl.int64)
    if parent_ptr is not None:
        source = row // width * num_nodes + tl.load(parent_ptr + row, mask=live, other=0)
    token = tl.load(id_ptr + row, mask=live, other=0)
    row_ptrs = tl.where(is_embedding, table_ptr, feature_ptr) + tl.where(is_embedding, token, source) * size
    column, first = tl.arange(0, OUT), head * (2 * HALF)
    weights = weight_ptr + (first + column).to(tl.int64)[:, None] * (2 * size) + tl.where(is_embedding, 0, size)
    begin = split % of_half * steps * IN
    acc, squares = part_of_sum(
        row_ptrs, live, weights, column < 2 * HALF, tl.where(is_embedding, embed_norm_ptr, feature_norm_ptr),
        begin, tl.minimum(begin + steps * IN, size), size, IN, OUT, ROWS, PRECISION,
    )  # fmt: skip
    split_size = NUM_ALL * 2 * HALF * ROWS
    sums = sums_ptr + split.to(tl.int64) * split_size + (first + column)[:, None] * ROWS + row[None, :]
    tl.store(sums, acc, mask=(column < 2 * HALF)[:, None])
    square_ptrs = squares_ptr + head * splits * ROWS + row
    tl.store(square_ptrs + split * ROWS, squares)
    tl.debug_barrier()  # all sums of the program are stored before one thread increments the counter
    if tl.atomic_add(counters_ptr + head, 1, sem="acq_rel") < splits - 1:
        return
    tl.store(counters_ptr + head, 0)

    dim = tl.arange(0, BLOCK_HALF)
    there = live[:, None] & (dim < HALF)[None, :]
    low_ptrs = sums_ptr + (first + dim)[None, :] * ROWS + row[:, None]
    low, high, _ = _sum_of_splits(
        low_ptrs, HALF * ROWS, square_ptrs, 0, of_half, split_size, size, eps, there, ROWS, BLOCK_HALF
    )
    more_low, more_high, scale = _sum_of_splits(
        low_ptrs, HALF * ROWS, square_ptrs, of_half, splits, split_size, size, eps, there, ROWS, BLOCK_HALF
    )
    low += more_low
    high += more_high
    if bias_ptr is not None:
        low += tl.load(bias_ptr + first + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        high += tl.load(bias_ptr + first + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    low, high = low.to(dtype), high.to(dtype)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if query_norm_ptr is not None:
            norm_ptr = tl.where(head < NUM_HEADS, query_norm_ptr, key_norm_ptr)
            weight_low = tl.load(norm_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
            weight_high = tl.load(norm_ptr + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
            low, high = normed_halves(low, high, weight_low, weight_high, head_eps, 2 * HALF)
        angle = row[:, None] * (2 * HALF) + HALF + dim[None, :]
        cos = tl.load(cos_ptr + angle, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=there, other=0.0).to(tl.float32)
        low, high = turned_halves(low, high, cos, sin)
    if head < NUM_HEADS:
        to_query = query_ptr + row[:, None] * (NUM_HEADS * 2 * HALF) + first + dim[None, :]
        tl.store(to_query, low, mask=there)
        tl.store(to_query + HALF, high, mask=there)
    else:
        slot = tl.load(slot_ptr + row, mask=live, other=0)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kv_head = head - NUM_HEADS
        to = key_cache_ptr + block * stride_key_block + place * stride_key_slot + kv_head * stride_key_head
        if kv_head >= NUM_KV_HEADS:
            kv_head -= NUM_KV_HEADS
            to = value_cache_ptr + block * stride_value_block + place * stride_value_slot + kv_head * stride_value_head
        # Slots in block 0 mark rows to drop, as in `layer.rotate_and_store`.
        kept = there & (slot >= BLOCK_SIZE)[:, None]
        cached: tl.constexpr = key_cache_ptr.dtype.element_ty
        tl.store(to[:, None] + dim[None, :], stored_as(low, cached), mask=kept)
        tl.store(to[:, None] + HALF + dim[None, :], stored_as(high, cached), mask=kept)
    if kept_ptr is not None:
        # The last program of each head copies a share of the features' columns.
        share = (size + NUM_ALL - 1) // NUM_ALL
        at = tl.arange(0, BLOCK_KEPT)
        mine = live[:, None] & ((at < share) & (head * share + at < size))[None, :]
        at += head * share
        values = tl.load(feature_ptr + source[:, None] * size + at[None, :], mask=mine, other=0.0)
        if NORMED:
            factors = tl.load(feature_norm_ptr + at, mask=at < size, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32) * factors[None, :]
        tl.store(kept_ptr + row.to(tl.int64)[:, None] * size + at[None, :], values.to(dtype), mask=mine)


def embed_to_heads(pairs: Pairs, projection: Projection, stored: Stored, normed: bool) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.few_rows.embedded.embed_to_heads`.

    Raises:
        ValueError: a tensor is not contiguous or has another shape or dtype.
    """
    token_ids, table, features, parents = pairs
    weight, bias, norms, eps, counters, head_norms = projection
    (num_rows,), size = token_ids.shape, features.shape[-1]
    _, block_size, num_kv_heads, dim = stored.key_cache.shape
    num_all = len(weight) // dim
    width, num_nodes = check_pairs(*pairs)
    turned = [(name, part, (num_rows, dim)) for name, part in (("cos", stored.cos), ("sin", stored.sin))]
    check([("table", table, (len(table), size)), *turned], features.dtype)
    check([("weight", weight, (num_all * dim, 2 * size))], features.dtype)
    check([(f"norms[{index}]", norm, (size,)) for index, norm in enumerate(norms)], features.dtype)
    check_weights([("head_norms", norm, (dim,)) for norm in head_norms[:2]], features.dtype)
    check([("slot_mapping", stored.slot_mapping, (num_rows,))], torch.int64)
    query = features.new_empty(num_rows, num_all - 2 * num_kv_heads, dim)
    kept = features.new_empty(num_rows, size) if normed or parents is not None else None
    if not num_rows:
        return query, features if kept is None else kept
    height, block_half = max(triton.next_power_of_2(num_rows), LEAST_HEIGHT), triton.next_power_of_2(dim // 2)
    columns, limits = max(2 * block_half, LEAST_HEIGHT), limits_of(features.device)
    in_tile, num_stages = read_ahead(limits, height, features.element_size(), columns, squares=True)
    steps, of_half = shares(limits, 2 * num_all, triton.cdiv(size, in_tile))
    sums = features.new_empty(2 * of_half, num_all * dim, height, dtype=torch.float32)
    query_norm, key_norm, head_eps = head_norms or (None, None, 0.0)
    with torch.cuda.device_of(features):
        _embed_to_heads_kernel[(num_all, 2 * of_half)](
            token_ids,
            table,
            features,
            parents,
            weight,
            bias,
            *norms,
            query_norm,
            key_norm,
            stored.cos,
            stored.sin,
            stored.slot_mapping,
            sums,
            sums.new_empty(num_all, 2 * of_half, height),
            counters,
            query,
            stored.key_cache,
            stored.value_cache,
            kept,
            *stored.key_cache.stride()[:3],
            *stored.value_cache.stride()[:3],
            num_rows,
            width,
            num_nodes,
            size,
            steps,
            eps,
            head_eps,
            NORMED=normed,
            NUM_HEADS=query.shape[1],
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=block_size,
            HALF=dim // 2,
            BLOCK_HALF=block_half,
            BLOCK_KEPT=triton.next_power_of_2(triton.cdiv(size, num_all)),
            ROWS=height,
            OUT=columns,
            IN=in_tile,
            PRECISION="ieee" if features.dtype == torch.float32 else "tf32",
            num_warps=4 if columns * height < 8192 else 8,
            num_stages=num_stages,
            # A fused multiply-add would round a rotation once where transformers rounds twice.
            **options(fused=False),
        )
    return query, features if kept is None else kept
