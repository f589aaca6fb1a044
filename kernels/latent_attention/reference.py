"""Rotates queries, and stores a latent or the keys and values made of it: torch reference; GPUs use one launch.

A key consists of a part of its own head, which is not rotated, and of a rotated part that all heads share
(DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from enum import Enum

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.kv.reference import store_kv


class Pairs(Enum):
    """Elements of a head that RoPE rotates together, and their places afterwards."""

    HALVES = "the first of one half and the first of the other"
    TO_HALVES = "neighbours, which the result has in two halves"
    STAY = "neighbours"


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
    """Applies RoPE (arXiv 2104.09864) to the last elements of queries and to `shared`, and stores keys and values.

    Args:
        query: [num_tokens, num_heads, plain + turned]; rows may have any stride.
        made: [num_tokens, num_heads, plain + value_dim], contiguous: a head's part of its key, then its value.
        shared: [num_tokens, turned]: the part of the keys that is rotated; rows may have any stride.
        cos: [num_tokens, turned] in the same dtype or float32, with equal halves, or [num_tokens, turned / 2]; `sin`
            likewise, with the same strides.
        key_cache: [num_blocks, block_size, num_heads, plain + turned] in the same dtype, or float8_e4m3fn, converted as
            by `store_kv`; `value_cache` likewise with value_dim.
        slot_mapping: int64 [num_tokens], as for `store_kv`.
        pairs: which elements are rotated together, and their order in the result.

    Returns:
        The rotated queries: [num_tokens, num_heads, plain + turned].
    """
    if kernels := choice.compiled("store_latents", query):
        return kernels.store_latents(query, made, shared, cos, sin, key_cache, value_cache, slot_mapping, pairs)
    turned = shared.shape[1]
    plain = query.shape[2] - turned
    rest = _turned(shared[:, None], cos, sin, pairs).expand(-1, query.shape[1], -1)
    store_kv(torch.cat([made[..., :plain], rest], dim=-1), made[..., plain:], key_cache, value_cache, slot_mapping)
    return torch.cat([query[..., :plain], _turned(query[..., plain:], cos, sin, pairs)], dim=-1)


def keep_latents(
    query: Tensor,
    absorbed: Tensor,
    latent: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    pairs: Pairs,
) -> Tensor:
    """Applies RoPE as `store_latents`; stores the latents and the rotated keys, which all heads share.

    On GPUs a product and a launch.

    Args:
        query: [num_tokens, num_heads, plain + turned]; rows may have any stride.
        absorbed: [num_heads, plain, rank]: the matrix that makes a head's part of its key from the latent.
        latent: [num_tokens, rank]; rows may have any stride. The other arguments are those of `store_latents`.
        key_cache: [num_blocks, block_size, 1, rank + turned]; the first elements of a key are its value.
        value_cache: [num_blocks, block_size, 1, rank], a view of `key_cache`.

    Returns:
        The queries to the stored keys: [num_tokens, num_heads, rank + turned].
    """
    plain, rank = absorbed.shape[1:]
    out = query.new_empty(*query.shape[:2], key_cache.shape[3])
    torch.bmm(query[..., :plain].transpose(0, 1), absorbed, out=out[..., :rank].transpose(0, 1))
    if kernels := choice.compiled("keep_latents", query):
        kernels.keep_latents(query[..., plain:], out, latent, shared, cos, sin, key_cache, slot_mapping, pairs)
        return out
    out[..., rank:] = _turned(query[..., plain:], cos, sin, pairs)
    key = torch.cat([latent[:, None], _turned(shared[:, None], cos, sin, pairs)], dim=-1)
    store_kv(key, latent[:, None], key_cache, value_cache, slot_mapping)
    return out


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """Returns the rotated elements [num_tokens, num_heads, turned]."""
    cos, sin = (part[:, None, -(heads.shape[-1] // 2) :] for part in (cos, sin))
    low, high = heads.chunk(2, dim=-1) if pairs is Pairs.HALVES else (heads[..., ::2], heads[..., 1::2])
    low, high = low * cos - high * sin, high * cos + low * sin
    turned = torch.stack([low, high], dim=-1).flatten(2) if pairs is Pairs.STAY else torch.cat([low, high], dim=-1)
    return turned.to(heads.dtype)
