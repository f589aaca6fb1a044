"""Steps of a decoder layer on a GPU, one launch each.

`wingbeat.kernels.layer.reference` selects kernel or reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.kv import stored_as
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.layer.reference import MOST_HIDDEN, WHOLE, Turn

_ROPE_TILE = 1024
_ANGLE_TILE = 256
_QUARTER = tl.constexpr(1.5707963267948966)
_ACTIVATION_TILE = 1024


@triton.jit
def _normed_row(total, weight_ptr, at, inside, size, eps):
    wide = total.to(tl.float32)
    normed = wide * tl.math.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if weight_ptr.dtype.element_ty == total.dtype:  # as in the reference, round before multiplying by the weight
        normed = normed.to(total.dtype).to(tl.float32)
    return (normed * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype)


@triton.jit
def _add_rms_norm_kernel(
    hidden_ptr,  # [num_tokens, size], rows `stride` apart
    residual_ptr,  # [num_tokens, size], or None
    weight_ptr,  # [size]
    then_ptr,  # [size]: weight of a second norm, of the sum, if NORM_FIRST; or None
    normed_ptr,  # [num_tokens, size], or None
    total_ptr,  # [num_tokens, size], or None
    other_ptr,  # [num_tokens, size], or None
    factor,  # of `hidden` in the sum, or None
    other_factor,
    stride,
    size,
    eps,
    NORM_FIRST: tl.constexpr,  # whether the norm of `hidden` is added, instead of `hidden`
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    row = token * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(hidden_ptr + token * stride + at, mask=inside, other=0.0)
    if residual_ptr is not None and not NORM_FIRST:
        before = tl.load(residual_ptr + row + at, mask=inside, other=0.0)
        addend = total.to(tl.float32)
        if factor is not None:
            addend *= factor
        if other_ptr is not None:
            addend += tl.load(other_ptr + row + at, mask=inside, other=0.0).to(tl.float32) * other_factor
        total = (before.to(tl.float32) + addend).to(total.dtype)
        tl.store(total_ptr + row + at, total, mask=inside)
    normed = _normed_row(total, weight_ptr, at, inside, size, eps)
    if NORM_FIRST:
        before = tl.load(residual_ptr + row + at, mask=inside, other=0.0)
        total = (before.to(tl.float32) + normed.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row + at, total, mask=inside)
        if then_ptr is not None:
            normed = _normed_row(total, then_ptr, at, inside, size, eps)
    if normed_ptr is not None:
        tl.store(normed_ptr + row + at, normed, mask=inside)


def add_rms_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    factors: tuple[float, float] | None = None,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.layer.reference.add_rms_norm`.

    Raises:
        ValueError: a tensor is not contiguous or has another shape or dtype, or a row is larger than MOST_HIDDEN.
    """
    is_part = residual is None and hidden.dim() == 2 and hidden.stride(1) == 1
    parts = [] if is_part else [("hidden", hidden, hidden.shape)]
    parts += [
        (name, part, hidden.shape) for name, part in (("residual", residual), ("other", other)) if part is not None
    ]
    check(parts, hidden.dtype)
    normed = hidden.new_empty(hidden.shape)
    total = hidden if residual is None else torch.empty_like(hidden)
    _norm(hidden, residual, weight, eps, normed, None if residual is None else total, other, factors)
    return normed, total


def add_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, then: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.layer.reference.add_norm`."""
    check([("hidden", hidden, hidden.shape), ("residual", residual, hidden.shape)], hidden.dtype)
    total, normed = torch.empty_like(hidden), None if then is None else torch.empty_like(hidden)
    _norm(hidden, residual, weight, eps, normed, total, norm_first=True, then=then)
    return total if normed is None else normed, total


def _norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor | None,
    total: Tensor | None = None,
    other: Tensor | None = None,
    factors: tuple[float, float] | None = None,
    norm_first: bool = False,
    then: Tensor | None = None,
) -> None:
    size = hidden.shape[-1]
    check_weights([("weight", weight, (size,)), *([] if then is None else [("then", then, (size,))])], hidden.dtype)
    if size > MOST_HIDDEN:
        raise ValueError(f"hidden has rows of {size} elements: a norm takes at most {MOST_HIDDEN}")
    if hidden.numel():
        block = triton.next_power_of_2(size)
        with torch.cuda.device_of(hidden):
            _add_rms_norm_kernel[(hidden.numel() // size,)](
                hidden,
                residual,
                weight,
                then,
                normed,
                total,
                other,
                *((None, None) if factors is None else map(float, factors)),
                hidden.stride(-2) if hidden.dim() > 1 else size,
                size,
                eps,
                NORM_FIRST=norm_first,
                BLOCK=block,
                num_warps=max(1, min(16, block // 512)),
                **options(fused=True),
            )


@triton.jit
def _norm_parts_kernel(
    row_ptr,  # [num_tokens, >= first_size + second_size], rows `stride` apart
    first_ptr,  # [first_size]
    second_ptr,  # [second_size]
    stride,
    first_size,
    second_size,
    eps,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program normalises one part of a row."""
    wait_for_launch(EARLY)
    row, at = row_ptr + tl.program_id(0).to(tl.int64) * stride, tl.arange(0, BLOCK)
    size = first_size
    if tl.program_id(1) == 0:
        weight = tl.load(first_ptr + at, mask=at < size, other=0.0)
    else:
        row += first_size
        size = second_size
        weight = tl.load(second_ptr + at, mask=at < size, other=0.0)
    values = tl.load(row + at, mask=at < size, other=0.0)
    wide = values.to(tl.float32)
    normed = wide * tl.math.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if weight.dtype == values.dtype:  # as in the reference, round before multiplying by the weight
        normed = normed.to(values.dtype).to(tl.float32)
    tl.store(row + at, (normed * weight.to(tl.float32)).to(values.dtype), mask=at < size)


def norm_parts(rows: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> None:
    """Launches the kernel for `wingbeat.kernels.layer.reference.norm_parts`."""
    sizes = [len(weight) for weight in weights]
    check_weights([("weight", weight, weight.shape) for weight in weights], rows.dtype)
    if max(sizes) > MOST_HIDDEN or sum(sizes) > rows.shape[1] or rows.stride(1) != 1:
        raise ValueError(f"rows are {tuple(rows.shape)}: parts of {sizes} do not fit")
    if len(rows):
        block = triton.next_power_of_2(max(sizes))
        with torch.cuda.device_of(rows):
            _norm_parts_kernel[(len(rows), 2)](
                rows,
                *weights,
                rows.stride(0),
                *sizes,
                eps,
                BLOCK=block,
                num_warps=max(1, min(16, block // 512)),
                **options(fused=True),
            )


@triton.jit
def _embed_beside_kernel(
    id_ptr,  # int64 [num_rows]
    table_ptr,  # [vocab_size, size]
    feature_ptr,  # [num_rows, size], or with parents [num_rows / width * num_nodes, size]
    parent_ptr,  # int64 [num_rows]: index of each row's features among its request's, or None
    embed_weight_ptr,  # [size]; `feature_weight_ptr` likewise
    feature_weight_ptr,
    out_ptr,  # [num_rows, 2 * size]
    kept_ptr,  # [num_rows, size]: features, normed if NORMED, or None
    width,
    num_nodes,
    size,
    eps,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    half = tl.program_id(1)
    if half == 0:
        values = tl.load(table_ptr + tl.load(id_ptr + row) * size + at, mask=inside, other=0.0)
        weight = tl.load(embed_weight_ptr + at, mask=inside, other=0.0)
    else:
        source = row
        if parent_ptr is not None:
            source = row // width * num_nodes + tl.load(parent_ptr + row)
        values = tl.load(feature_ptr + source * size + at, mask=inside, other=0.0)
        weight = tl.load(feature_weight_ptr + at, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = ((wide * scale).to(values.dtype).to(tl.float32) * weight.to(tl.float32)).to(values.dtype)
    tl.store(out_ptr + row * 2 * size + half * size + at, normed, mask=inside)
    if kept_ptr is not None and half == 1:
        tl.store(kept_ptr + row * size + at, normed if NORMED else values, mask=inside)


def check_pairs(token_ids: Tensor, table: Tensor, features: Tensor, parents: Tensor | None) -> tuple[int, int]:
    """Checks rows of tokens and features; returns the number of rows and of features per request, 1 without parents.

    Raises:
        ValueError: as `add_rms_norm`.
    """
    num_rows, size = len(token_ids), features.shape[-1]
    width, num_nodes = (1, 1) if parents is None else (parents.shape[1], features.shape[1])
    shape = (num_rows, size) if parents is None else (len(parents), num_nodes, size)
    check([("features", features, shape), ("table", table, table.shape)], features.dtype)
    indices = [("token_ids", token_ids, (num_rows,))]
    check(indices if parents is None else [*indices, ("parents", parents, (num_rows // width, width))], torch.int64)
    return width, num_nodes


def embed_beside(
    token_ids: Tensor,
    table: Tensor,
    features: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    parents: Tensor | None = None,
    normed: bool = True,
) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.layer.reference.embed_beside`.

    Raises:
        ValueError: as `add_rms_norm`.
    """
    num_rows, size = len(token_ids), features.shape[-1]
    width, num_nodes = check_pairs(token_ids, table, features, parents)
    check([(f"weights[{index}]", weight, (size,)) for index, weight in enumerate(weights)], features.dtype)
    if size > MOST_HIDDEN or table.shape[1] != size:
        raise ValueError(f"table is {tuple(table.shape)}: rows of {size} elements needed, at most {MOST_HIDDEN}")
    out = features.new_empty(num_rows, 2 * size)
    kept = features.new_empty(num_rows, size) if normed or parents is not None else None
    if num_rows:
        block = triton.next_power_of_2(size)
        with torch.cuda.device_of(features):
            _embed_beside_kernel[(num_rows, 2)](
                token_ids,
                table,
                features,
                parents,
                *weights,
                out,
                kept,
                width,
                num_nodes,
                size,
                eps,
                NORMED=normed,
                BLOCK=block,
                num_warps=max(1, min(16, block // 512)),
                **options(fused=True),
            )
    return out, features if kept is None else kept


@triton.jit
def normed_halves(low, high, weight_low, weight_high, eps, DIM: tl.constexpr):
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = tl.math.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
    low, high = low * scale, high * scale
    if weight_low.dtype == dtype:  # as in the reference, round before multiplying by the weight
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    return (low * weight_low.to(tl.float32)).to(dtype), (high * weight_high.to(tl.float32)).to(dtype)


@triton.jit
def turned_halves(low, high, cos, sin):
    """Rotates the halves of heads by angles. As in the reference, each product is rounded, and then each sum of two
    products.
    """
    dtype = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    low_cos, high_sin = (wide_low * cos).to(dtype).to(tl.float32), (wide_high * sin).to(dtype).to(tl.float32)
    high_cos, low_sin = (wide_high * cos).to(dtype).to(tl.float32), (wide_low * sin).to(dtype).to(tl.float32)
    return (low_cos - high_sin).to(dtype), (high_cos + low_sin).to(dtype)


@triton.jit(do_not_specialize=["count", "scale"])
def _rotations_kernel(
    position_ptr,  # int64 [count / width]
    frequency_ptr,  # float32 [size]
    cos_ptr,  # [count]
    sin_ptr,  # [count]
    scale,
    count,
    size,
    width,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    position = tl.load(position_ptr + at // width, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(frequency_ptr + at % size, mask=inside, other=0.0)
    # Quarter turns are subtracted in double precision, so the remainder is exact up to about a million turns.
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = (angle.to(tl.float64) - quarters.to(tl.float64) * _QUARTER).to(tl.float32)
    square = rest * rest
    # Cephes' polynomials, accurate to one rounding up to an eighth of a turn on either side of zero.
    sine = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * rest + rest
    cosine = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    cosine = cosine * square * square - 0.5 * square + 1.0
    turn = quarters.to(tl.int32) & 3
    swapped = (turn & 1) != 0
    cos, sin = tl.where(swapped, sine, cosine), tl.where(swapped, cosine, sine)
    cos, sin = tl.where((turn == 1) | (turn == 2), -cos, cos), tl.where(turn >= 2, -sin, sin)
    tl.store(cos_ptr + at, (cos * scale).to(cos_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + at, (sin * scale).to(sin_ptr.dtype.element_ty), mask=inside)


def rotations(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, halves: int
) -> tuple[Tensor, Tensor]:
    """Launches the kernel for `wingbeat.kernels.layer.reference.rotations`."""
    width = halves * len(frequencies)
    cos, sin = (torch.empty(*positions.shape, width, dtype=dtype, device=positions.device) for _ in range(2))
    if cos.numel():
        with torch.cuda.device_of(positions):
            _rotations_kernel[(triton.cdiv(cos.numel(), _ANGLE_TILE),)](
                positions.contiguous(),
                frequencies,
                cos,
                sin,
                scale,
                cos.numel(),
                len(frequencies),
                width,
                TILE=_ANGLE_TILE,
                num_warps=4,
                # A fused multiply-add would round an angle once where torch rounds twice.
                **options(fused=False),
            )
    return cos, sin


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _rotate_and_store_kernel(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    cos_ptr,  # [num_tokens, WIDTH]
    sin_ptr,  # [num_tokens, WIDTH]
    query_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF]
    value_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF]
    slot_ptr,  # int64 [num_tokens]
    query_norm_ptr,  # [2 * HALF], or None
    key_norm_ptr,  # [2 * HALF], or None
    eps,
    factor,  # of queries and values, or None
    key_factor,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,  # number of pairs that are rotated
    IN_PAIRS: tl.constexpr,
    NORM_LAST: tl.constexpr,
    REPEATED: tl.constexpr,  # whether equal angles are next to each other
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    num_all = NUM_HEADS + 2 * NUM_KV_HEADS
    inside = (head < num_all) & (dim < HALF)
    # Each lane holds two elements of a head. Elements that are not rotated are behind the rotated ones.
    low_at = tl.where(dim < TURNED, dim * 2 if IN_PAIRS else dim, dim + TURNED)
    high_at = tl.where(dim < TURNED, dim * 2 + 1 if IN_PAIRS else dim + TURNED, dim + HALF)
    at = qkv_ptr + token * (num_all * 2 * HALF) + head * (2 * HALF)
    low = tl.load(at + low_at, mask=inside, other=0.0)
    high = tl.load(at + high_at, mask=inside, other=0.0)
    is_query = inside & (head < NUM_HEADS)
    is_key = inside & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = inside & (head >= NUM_HEADS + NUM_KV_HEADS)
    if factor is not None:
        own = tl.where(is_key, key_factor, factor)
        low, high = (low.to(tl.float32) * own).to(low.dtype), (high.to(tl.float32) * own).to(high.dtype)
    turned_low, turned_high = low, high
    angle = token * WIDTH + (2 * dim if REPEATED else WIDTH - TURNED + dim)
    cos = tl.load(cos_ptr + angle, mask=dim < TURNED, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=dim < TURNED, other=0.0).to(tl.float32)
    if NORM_LAST:
        turned_low, turned_high = turned_halves(turned_low, turned_high, cos, sin)
    if query_norm_ptr is not None:
        weight_low = tl.load(query_norm_ptr + low_at + 0 * head, mask=is_query, other=0.0)
        weight_high = tl.load(query_norm_ptr + high_at + 0 * head, mask=is_query, other=0.0)
        key_low = tl.load(key_norm_ptr + low_at + 0 * head, mask=is_key, other=0.0)
        key_high = tl.load(key_norm_ptr + high_at + 0 * head, mask=is_key, other=0.0)
        weight_low, weight_high = tl.where(is_key, key_low, weight_low), tl.where(is_key, key_high, weight_high)
        turned_low, turned_high = normed_halves(turned_low, turned_high, weight_low, weight_high, eps, 2 * HALF)
    if not NORM_LAST:
        turned_low, turned_high = turned_halves(turned_low, turned_high, cos, sin)
    to_query = query_ptr + token * (NUM_HEADS * 2 * HALF) + head * (2 * HALF)
    tl.store(to_query + low_at, turned_low, mask=is_query)
    tl.store(to_query + high_at, turned_high, mask=is_query)
    slot = tl.load(slot_ptr + token)
    # Slots in block 0 mark rows to drop. Such rows are not written at all, because many of them occur at once.
    if slot >= BLOCK_SIZE:
        block, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        to_key = key_cache_ptr + block * stride_key_block + row * stride_key_slot
        to_key += (head - NUM_HEADS) * stride_key_head
        stored: tl.constexpr = key_cache_ptr.dtype.element_ty
        tl.store(to_key + low_at, stored_as(turned_low, stored), mask=is_key)
        tl.store(to_key + high_at, stored_as(turned_high, stored), mask=is_key)
        to_value = value_cache_ptr + block * stride_value_block + row * stride_value_slot
        to_value += (head - NUM_HEADS - NUM_KV_HEADS) * stride_value_head
        tl.store(to_value + low_at, stored_as(low, stored), mask=is_value)
        tl.store(to_value + high_at, stored_as(high, stored), mask=is_value)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    turn: Turn = WHOLE,
    factors: tuple[float, float] | None = None,
) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.layer.reference.rotate_and_store`."""
    num_tokens, num_all, dim = qkv.shape
    num_kv_heads = key_cache.shape[2]
    num_heads = num_all - 2 * num_kv_heads
    turned, width = turn.num_pairs(cos), cos.shape[-1]
    if not 0 <= turned <= min(dim // 2, width):
        raise ValueError(f"{turned} pairs are rotated by cos {tuple(cos.shape)} in heads of {dim} elements")
    parts = [("qkv", qkv, qkv.shape), ("cos", cos, (num_tokens, width)), ("sin", sin, (num_tokens, width))]
    check(parts, qkv.dtype)
    norms = {"query_norm": query_norm, "key_norm": key_norm}
    check_weights([(name, norm, (dim,)) for name, norm in norms.items() if norm is not None], qkv.dtype)
    check([("slot_mapping", slot_mapping, (num_tokens,))], torch.int64)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if (
            cache.dtype not in (qkv.dtype, torch.float8_e4m3fn)
            or cache.dtype != key_cache.dtype
            or cache.shape[1:] != (key_cache.shape[1], num_kv_heads, dim)
            or cache.stride(3) != 1
        ):
            raise ValueError(f"{name} is {cache.dtype} {tuple(cache.shape)}: it does not fit qkv {tuple(qkv.shape)}")
    if num_heads < 1 or dim % 2 or (query_norm is None) != (key_norm is None):
        raise ValueError(
            f"qkv is {tuple(qkv.shape)}: query heads, {num_kv_heads} KV heads, even size, 0 or 2 norms needed"
        )
    query = qkv.new_empty(num_tokens, num_heads, dim)
    if num_tokens == 0:
        return query
    block_half = triton.next_power_of_2(dim // 2)
    block_heads = max(1, min(triton.next_power_of_2(num_all), _ROPE_TILE // (2 * block_half)))
    with torch.cuda.device_of(qkv):
        _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_all, block_heads))](
            qkv,
            cos,
            sin,
            query,
            key_cache,
            value_cache,
            slot_mapping,
            query_norm,
            key_norm,
            eps,
            *((None, None) if factors is None else map(float, factors)),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=key_cache.shape[1],
            HALF=dim // 2,
            WIDTH=width,
            TURNED=turned,
            IN_PAIRS=turn.in_pairs,
            NORM_LAST=turn.norm_last,
            REPEATED=turn.repeated,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            num_warps=max(1, min(4, block_heads * block_half // 128)),
            # A fused multiply-add would round once where transformers rounds twice.
            **options(fused=False),
        )
    return query


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size]
    size,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < size
    gate = tl.load(gate_up_ptr + token * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * size + at, out.to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.layer.reference.silu_mul`.

    Raises:
        ValueError: `gate_up` is not contiguous.
    """
    check([("gate_up", gate_up, gate_up.shape)], gate_up.dtype)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    if out.numel():
        tile = min(_ACTIVATION_TILE, triton.next_power_of_2(size))
        with torch.cuda.device_of(gate_up):
            _silu_mul_kernel[(num_tokens, triton.cdiv(size, tile))](
                gate_up,
                out,
                size,
                TILE=tile,
                num_warps=max(1, min(4, tile // 256)),
                **options(fused=True),
            )
    return out


@triton.jit
def _gated_norm_kernel(
    values,  # [num_rows, size]
    gate,
    weight,  # [size] or [group_size], or None
    out,  # [num_rows, size]
    row_strides,  # of the gate: [num_rows / num_inner, num_inner, size]
    num_inner,
    size,
    group_size,
    weight_step,
    eps,
    factor,
    GATE_FIRST: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = tl.arange(0, TILE)
    at = group * group_size + inner
    inside = (inner < group_size) & (at < size)
    wide = tl.load(values + row * size + at, mask=inside, other=0.0)
    gates = gate + row // num_inner * row_strides[0] + row % num_inner * row_strides[1]
    active = tl.load(gates + at * row_strides[2], mask=inside, other=0.0).to(tl.float32) * factor
    active = active / (1.0 + tl.exp(-active))
    dtype: tl.constexpr = values.dtype.element_ty
    wide = wide.to(tl.float32)
    if GATE_FIRST:
        wide *= active
    if weight is not None:
        wide *= tl.math.rsqrt(tl.sum(wide * wide, 0) / group_size + eps)
        normed = wide.to(dtype)  # as in the reference, round before multiplying by the weight
        wide = normed.to(tl.float32) * tl.load(weight + group * weight_step + inner, mask=inside, other=0.0)
    if not GATE_FIRST:
        wide = wide.to(dtype).to(tl.float32) * active
    tl.store(out + row * size + at, wide.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    values: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group_size: int, gate_first: bool, factor: float
) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.layer.reference.gated_norm`."""
    size = values.shape[-1]
    group_size = min(_ACTIVATION_TILE, triton.next_power_of_2(size)) if weight is None else group_size
    out = torch.empty(values.shape, dtype=gate.dtype, device=gate.device)
    gates = gate.flatten(0, -3) if gate.dim() > 3 else gate
    if out.numel():
        with torch.cuda.device_of(gate):
            _gated_norm_kernel[(out.numel() // size, triton.cdiv(size, group_size))](
                values,
                gates,
                weight,
                out,
                gates.stride(),
                gates.shape[1],
                size,
                group_size,
                0 if weight is None or len(weight) == group_size else group_size,
                float(eps),
                float(factor),
                GATE_FIRST=gate_first,
                TILE=triton.next_power_of_2(group_size),
                num_warps=max(1, min(8, group_size // 256)),
                **options(fused=True),
            )
    return out


def check(parts: list[tuple[str, Tensor, tuple[int, ...]]], dtype: torch.dtype) -> None:
    for name, part, shape in parts:
        if part.dtype != dtype or tuple(part.shape) != tuple(shape) or not part.is_contiguous():
            raise ValueError(
                f"{name} is {part.dtype} {tuple(part.shape)}, strides {part.stride()}: "
                f"contiguous {dtype} {tuple(shape)} needed"
            )


def check_weights(parts: list[tuple[str, Tensor, tuple[int, ...]]], dtype: torch.dtype) -> None:
    """Checks norm weights, whose dtype must be the rows' dtype or float32."""
    check(parts, torch.float32 if parts and parts[0][1].dtype == torch.float32 else dtype)
