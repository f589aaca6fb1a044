"""Attention of query rows over a paged KV cache under an additive mask: the torch reference, and the CPU path.

Prompt chunks, plain decodes and token trees differ only in their mask, so one function serves all three.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def context_mask(
    query_positions: Tensor,
    num_context: Tensor,
    visible: Tensor,
    num_keys: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Additive mask of `num_query` new rows over the committed context and each other.

    Args:
        query_positions: int64 [num_reqs, num_query], logical positions (context + depth in a tree).
        num_context: int64 [num_reqs], committed tokens before the first new row; row j is stored at num_context + j.
        visible: bool [num_reqs, num_query, num_query], which new rows each row attends to (itself included).
        num_keys: keys in the gathered context, at least num_context + num_query.
        sliding_window: keys at logical distance >= this are hidden; None hides nothing.

    Returns:
        [num_reqs, num_query, num_keys] in `dtype`: 0 where visible, the most negative finite value elsewhere.
    """
    num_reqs, num_query = query_positions.shape
    keys = torch.arange(num_keys, device=query_positions.device)
    relative = (keys - num_context[:, None]).clamp(-1, num_query)  # [num_reqs, num_keys]; -1 context, num_query past
    padded = F.pad(visible, (1, 1))
    padded[..., 0] = True
    shown = padded.gather(2, (relative + 1)[:, None, :].expand(num_reqs, num_query, num_keys))
    if sliding_window is not None:
        past = F.pad(query_positions, (0, 1))
        new = past.gather(1, relative.clamp_min(0))
        key_positions = torch.where(relative < 0, keys, new)
        shown = shown & (query_positions[:, :, None] - key_positions[:, None, :] < sliding_window)
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device)
    return mask.masked_fill_(~shown, torch.finfo(dtype).min)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_block: int | None = None,
) -> Tensor:
    """Attend to the blocks of each request.

    Args:
        query: [num_reqs, num_query, num_heads, key_dim].
        key_cache: [num_blocks, block_size, num_kv_heads, key_dim]; `value_cache` likewise with value_dim.
        block_tables: int64 [num_reqs, num_table_blocks].
        mask: additive [num_reqs, num_query, num_table_blocks * block_size].
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sinks: [num_heads] logits of an extra key without a value (gpt-oss).
        first_block: of a single request whose blocks follow one another: read in place, where others are gathered.

    Returns:
        [num_reqs, num_query, num_heads, value_dim].
    """
    num_reqs, num_blocks = block_tables.shape
    blocks = block_tables.flatten()
    key, value = (
        (cache.index_select(0, blocks) if first_block is None else cache[first_block : first_block + num_blocks]).view(
            num_reqs, -1, *cache.shape[2:]
        )
        for cache in (key_cache, value_cache)
    )
    return masked_attention(query, key, value, mask, scaling, softcap, sinks)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention over dense keys [num_reqs, num_keys, num_kv_heads, dim]; else as `paged_attention`."""
    num_reqs, num_query, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = key.shape[2], value.shape[3]
    group = num_heads // num_kv_heads
    # The heads of a group share their keys: they become rows of one tile.
    packed = query.view(num_reqs, num_query, num_kv_heads, group, key_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(num_reqs, num_kv_heads, group * num_query, key_dim)
    mask = mask[:, None, None].expand(num_reqs, 1, group, num_query, -1).reshape(num_reqs, 1, group * num_query, -1)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        logits = (packed @ key.transpose(2, 3)) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = (logits + mask).float()
        if sinks is not None:
            sink = sinks.view(1, num_kv_heads, group, 1).expand(num_reqs, -1, -1, num_query)
            logits = torch.cat([logits, sink.reshape(num_reqs, num_kv_heads, -1, 1).float()], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]].to(value.dtype)
        out = weights @ value
    out = out.view(num_reqs, num_kv_heads, group, num_query, value_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(num_reqs, num_query, num_heads, value_dim)
