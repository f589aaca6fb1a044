"""Rotates queries, and stores a latent or the keys and values made of it, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.kv import stored_as
from wingbeat.kernels.gpu.layer import check, turned_halves
from wingbeat.kernels.latent_attention.reference import Pairs
from wingbeat.kernels.launching import options, wait_for_launch

_TILE = 1024
"""Elements of queries per program."""


@triton.jit
def _turn(
    source,
    target,
    pair,
    is_pair,
    cos,
    sin,
    HALF: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    STAY: tl.constexpr,
    STORED: tl.constexpr,
):
    """Rotates the pairs of elements at `source`, and stores them at `target`."""
    low = tl.load(source + (2 * pair if IN_PAIRS else pair), mask=is_pair, other=0.0)
    high = tl.load(source + (2 * pair + 1 if IN_PAIRS else pair + HALF), mask=is_pair, other=0.0)
    low, high = turned_halves(low, high, cos, sin)
    tl.store(target + (2 * pair if STAY else pair), stored_as(low, STORED), mask=is_pair)
    tl.store(target + (2 * pair + 1 if STAY else pair + HALF), stored_as(high, STORED), mask=is_pair)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _store_latents_kernel(
    query_ptr,  # [num_tokens, num_heads, PLAIN + 2 * HALF]
    made_ptr,  # [num_tokens, num_heads, PLAIN + VALUE]
    shared_ptr,  # [num_tokens, 2 * HALF]
    cos_ptr,  # [num_tokens, HALF]; `sin_ptr` likewise
    sin_ptr,
    out_ptr,  # [num_tokens, num_heads, PLAIN + 2 * HALF]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_heads, PLAIN + 2 * HALF]
    value_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_heads, VALUE]
    slot_ptr,  # int64 [num_tokens]
    num_heads,
    stride_wave,
    stride_query,
    stride_shared,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    BLOCK_SIZE: tl.constexpr,
    PLAIN: tl.constexpr,
    HALF: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,  # stride of a wave's elements
    IN_PAIRS: tl.constexpr,
    STAY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    plain, pair = tl.arange(0, BLOCK_PLAIN)[None, :], tl.arange(0, BLOCK_HALF)[None, :]
    value = tl.arange(0, BLOCK_VALUE)[None, :]
    is_plain, is_pair = (head < num_heads) & (plain < PLAIN), (head < num_heads) & (pair < HALF)
    is_value = (head < num_heads) & (value < VALUE)
    cos = tl.load(cos_ptr + token * stride_wave + pair * STEP, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_wave + pair * STEP, mask=pair < HALF, other=0.0).to(tl.float32)

    query = query_ptr + token * stride_query + head * (PLAIN + 2 * HALF)
    out = out_ptr + (token * num_heads + head) * (PLAIN + 2 * HALF)
    tl.store(out + plain, tl.load(query + plain, mask=is_plain, other=0.0), mask=is_plain)
    _turn(query + PLAIN, out + PLAIN, pair, is_pair, cos, sin, HALF, IN_PAIRS, STAY, out_ptr.dtype.element_ty)

    slot = tl.load(slot_ptr + token)
    # Slots in block 0 mark rows to drop. Such rows are not written at all, because many of them occur at once.
    if slot >= BLOCK_SIZE:
        shared = shared_ptr + token * stride_shared
        made = made_ptr + (token * num_heads + head) * (PLAIN + VALUE)
        block, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        to_key = key_cache_ptr + block * stride_key_block + row * stride_key_slot + head * stride_key_head
        to_value = value_cache_ptr + block * stride_value_block + row * stride_value_slot + head * stride_value_head
        stored: tl.constexpr = key_cache_ptr.dtype.element_ty
        own = tl.load(made + plain, mask=is_plain, other=0.0)
        tl.store(to_key + plain, stored_as(own, stored), mask=is_plain)
        _turn(shared, to_key + PLAIN, pair, is_pair, cos, sin, HALF, IN_PAIRS, STAY, stored)
        own = tl.load(made + PLAIN + value, mask=is_value, other=0.0)
        tl.store(to_value + value, stored_as(own, stored), mask=is_value)


def _waves(cos: Tensor, sin: Tensor, num_tokens: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the last `half` columns of the waves; raises ValueError if they do not fit queries of this dtype."""
    fits = cos.shape in ((num_tokens, half), (num_tokens, 2 * half)) and cos.dtype in (dtype, torch.float32)
    if not fits or (sin.shape, sin.stride(), sin.dtype) != (cos.shape, cos.stride(), cos.dtype):
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit {num_tokens} tokens")
    return cos[:, -half:], sin[:, -half:]


def store_latents(
    query: Tensor,
    made: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    pairs: Pairs,
) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.latent_attention.reference.store_latents`.

    Raises:
        ValueError: shapes, dtypes or strides do not match.
    """
    (num_tokens, num_heads, key_dim), half = query.shape, shared.shape[1] // 2
    plain, value_dim = key_dim - 2 * half, value_cache.shape[3]
    check([("made", made, (num_tokens, num_heads, plain + value_dim))], query.dtype)
    cos, sin = _waves(cos, sin, num_tokens, half, query.dtype)
    check([("slot_mapping", slot_mapping, (num_tokens,))], torch.int64)
    for name, cache, dim in (("key_cache", key_cache, key_dim), ("value_cache", value_cache, value_dim)):
        is_known = cache.dtype == key_cache.dtype and cache.dtype in (query.dtype, torch.float8_e4m3fn)
        if not is_known or cache.shape[1:] != (key_cache.shape[1], num_heads, dim) or cache.stride(3) != 1:
            raise ValueError(
                f"{name} is {cache.dtype} {tuple(cache.shape)}: it does not fit query {tuple(query.shape)}"
            )
    is_laid = query.stride()[1:] == (key_dim, 1) and shared.stride(1) == 1
    if not is_laid or shared.shape != (num_tokens, 2 * half) or shared.dtype != query.dtype or plain < 1:
        raise ValueError(f"shared is {shared.dtype} {tuple(shared.shape)}: it does not fit query {tuple(query.shape)}")
    out = query.new_empty(query.shape)
    if num_tokens == 0:
        return out
    block_plain = triton.next_power_of_2(plain)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _TILE // block_plain))
    with torch.cuda.device_of(query):
        _store_latents_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
            query,
            made,
            shared,
            cos,
            sin,
            out,
            key_cache,
            value_cache,
            slot_mapping,
            num_heads,
            cos.stride(0),
            query.stride(0),
            shared.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            BLOCK_SIZE=key_cache.shape[1],
            PLAIN=plain,
            HALF=half,
            VALUE=value_dim,
            STEP=cos.stride(1),
            IN_PAIRS=pairs is not Pairs.HALVES,
            STAY=pairs is Pairs.STAY,
            BLOCK_HEADS=block_heads,
            BLOCK_PLAIN=block_plain,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_VALUE=triton.next_power_of_2(value_dim),
            num_warps=max(1, min(4, block_heads * block_plain // 256)),
            # A fused multiply-add would round once where transformers rounds twice.
            **options(fused=False),
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _keep_latents_kernel(
    query_ptr,  # [num_tokens, num_heads, 2 * HALF]
    out_ptr,  # [num_tokens, num_heads, RANK + 2 * HALF]: from RANK on
    latent_ptr,  # [num_tokens, RANK]
    shared_ptr,  # [num_tokens, 2 * HALF]
    cos_ptr,  # [num_tokens, HALF]; `sin_ptr` likewise
    sin_ptr,
    cache_ptr,  # [num_blocks, BLOCK_SIZE, 1, RANK + 2 * HALF]
    slot_ptr,  # int64 [num_tokens]
    num_heads,
    stride_wave,
    stride_query,
    stride_query_head,
    stride_latent,
    stride_shared,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,  # stride of a wave's elements
    IN_PAIRS: tl.constexpr,
    STAY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = (head < num_heads) & (pair < HALF)
    cos = tl.load(cos_ptr + token * stride_wave + pair * STEP, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_wave + pair * STEP, mask=pair < HALF, other=0.0).to(tl.float32)
    query = query_ptr + token * stride_query + head * stride_query_head
    out = out_ptr + (token * num_heads + head) * (RANK + 2 * HALF) + RANK
    _turn(query, out, pair, is_pair, cos, sin, HALF, IN_PAIRS, STAY, out_ptr.dtype.element_ty)

    slot = tl.load(slot_ptr + token)
    # Slots in block 0 mark rows to drop.
    if (slot >= BLOCK_SIZE) & (tl.program_id(1) == 0):
        shared = shared_ptr + token * stride_shared
        cache = cache_ptr + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
        stored: tl.constexpr = cache_ptr.dtype.element_ty
        _turn(shared, cache + RANK, pair, pair < HALF, cos, sin, HALF, IN_PAIRS, STAY, stored)
        at = tl.arange(0, BLOCK_RANK)
        latent = tl.load(latent_ptr + token * stride_latent + at, mask=at < RANK, other=0.0)
        tl.store(cache + at, stored_as(latent, stored), mask=at < RANK)


def keep_latents(
    query: Tensor,
    out: Tensor,
    latent: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    pairs: Pairs,
) -> None:
    """Launches the kernel for `wingbeat.kernels.latent_attention.reference.keep_latents`.

    Args:
        query: [num_tokens, num_heads, turned]: the elements of the queries that are rotated.
        out: [num_tokens, num_heads, rank + turned], contiguous; the rotated elements are written.

    Raises:
        ValueError: shapes, dtypes or strides do not match.
    """
    (num_tokens, num_heads, turned), rank = query.shape, latent.shape[1]
    check([("out", out, (num_tokens, num_heads, rank + turned))], query.dtype)
    cos, sin = _waves(cos, sin, num_tokens, turned // 2, query.dtype)
    check([("slot_mapping", slot_mapping, (num_tokens,))], torch.int64)
    for name, part, dim in (("latent", latent, rank), ("shared", shared, turned)):
        if part.dtype != query.dtype or part.shape != (num_tokens, dim) or part.stride(1) != 1 or query.stride(2) != 1:
            raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}: it does not fit query {tuple(query.shape)}")
    is_known = cache.dtype in (query.dtype, torch.float8_e4m3fn)
    if not is_known or cache.shape[2:] != (1, rank + turned) or cache.stride(3) != 1:
        raise ValueError(f"key_cache is {cache.dtype} {tuple(cache.shape)}: it does not fit out {tuple(out.shape)}")
    if num_tokens == 0:
        return
    half = turned // 2
    block_half = triton.next_power_of_2(half)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _TILE // block_half))
    with torch.cuda.device_of(query):
        _keep_latents_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
            query,
            out,
            latent,
            shared,
            cos,
            sin,
            cache,
            slot_mapping,
            num_heads,
            cos.stride(0),
            *query.stride()[:2],
            latent.stride(0),
            shared.stride(0),
            *cache.stride()[:2],
            BLOCK_SIZE=cache.shape[1],
            RANK=rank,
            HALF=half,
            STEP=cos.stride(1),
            IN_PAIRS=pairs is not Pairs.HALVES,
            STAY=pairs is Pairs.STAY,
            BLOCK_HEADS=block_heads,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_HALF=block_half,
            num_warps=max(1, min(4, block_heads * block_half // 256)),
            # A fused multiply-add would round once where transformers rounds twice.
            **options(fused=False),
        )
