"""Rotates queries, and stores a latent or the keys and values made of it: torch reference; GPUs use one launch.

A key consists of a part of its own head, which is not rotated, and of a rotated part that all heads share
(DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.kv.reference import store_kv


def store_latents(
    query: Tensor,
    made: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    in_pairs: bool,
) -> Tensor:
    """Applies RoPE (arXiv 2104.09864) to the last elements of queries and to `shared`, and stores keys and values.

    Args:
        query: [num_tokens, num_heads, plain + turned]; rows may have any stride.
        made: [num_tokens, num_heads, plain + value_dim], contiguous: a head's part of its key, then its value.
        shared: [num_tokens, turned]: the part of the keys that is rotated; rows may have any stride.
        cos: [num_tokens, turned] in the same dtype, contiguous, with equal halves; `sin` likewise.
        key_cache: [num_blocks, block_size, num_heads, plain + turned] in the same dtype, or float8_e4m3fn, converted as
            by `store_kv`; `value_cache` likewise with value_dim.
        slot_mapping: int64 [num_tokens], as for `store_kv`.
        in_pairs: whether neighbouring elements are rotated together, instead of elements of the two halves. The result
            has the first of all pairs, then the second.

    Returns:
        The rotated queries: [num_tokens, num_heads, plain + turned].
    """
    if kernels := choice.compiled("store_latents", query):
        return kernels.store_latents(query, made, shared, cos, sin, key_cache, value_cache, slot_mapping, in_pairs)
    turned = shared.shape[1]
    plain = query.shape[2] - turned
    low_key, high_key = _turned(shared[:, None], cos, sin, in_pairs)
    rest = torch.cat([low_key, high_key], dim=-1).expand(-1, query.shape[1], -1)
    store_kv(torch.cat([made[..., :plain], rest], dim=-1), made[..., plain:], key_cache, value_cache, slot_mapping)
    return torch.cat([query[..., :plain], *_turned(query[..., plain:], cos, sin, in_pairs)], dim=-1)


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
    in_pairs: bool,
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
        kernels.keep_latents(query[..., plain:], out, latent, shared, cos, sin, key_cache, slot_mapping, in_pairs)
        return out
    out[..., rank:] = torch.cat(_turned(query[..., plain:], cos, sin, in_pairs), dim=-1)
    turned = torch.cat(_turned(shared[:, None], cos, sin, in_pairs), dim=-1)
    key = torch.cat([latent[:, None], turned], dim=-1)
    store_kv(key, latent[:, None], key_cache, value_cache, slot_mapping)
    return out


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool) -> tuple[Tensor, Tensor]:
    """Returns the first and the second elements of the rotated pairs."""
    cos, sin = (part[:, None, part.shape[-1] // 2 :] for part in (cos, sin))
    low, high = (heads[..., ::2], heads[..., 1::2]) if in_pairs else heads.chunk(2, dim=-1)
    return low * cos - high * sin, high * cos + low * sin
