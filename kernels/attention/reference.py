"""Attention of query rows over a paged KV cache: the entry point for all devices, and the torch reference.

Prompt chunks, plain decodes and draft trees differ only in their mask, so one function serves all three. The reference
adds a dense mask to the logits, and is the CPU path. On GPUs `tree_attention` runs `kernels.gpu.attention.launch`,
which needs no dense mask, for heads up to `MAX_HEAD_DIM`, and up to `MAX_VALUE_DIM` if values lie in keys. Wider heads
(Gemma 4) use the reference on GPUs too; the shapes in the reference are fixed, so a CUDA graph can capture it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.tree.reference import unpack_mask

MAX_HEAD_DIM = 256
MAX_VALUE_DIM = 512
_FP8 = torch.float8_e4m3fn
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Attends to the committed context, and to the new rows after the context that the mask makes visible.

    New row n is stored at index num_context + n of its request. The queries are the last `num_query` of `num_new` new
    rows: all new rows in a verify pass, the rows of the newest level while a drafter grows a tree. On CUDA the launches
    depend on shapes only and can be captured in a CUDA graph.

    Args:
        query: [num_reqs, num_query, num_heads, key_dim], float32, float16 or bfloat16.
        key_cache: [num_blocks, block_size, num_kv_heads, key_dim] in the query's dtype or float8_e4m3fn; `value_cache`
            likewise with value_dim. Slots of new rows hold finite values.
        block_tables: int64 [num_reqs, width]; keys past width * block_size are not read.
        num_context: int64 [num_reqs], tokens before the first new row, on the query's device. A negative value, down to
            -15, means that the first new rows lie before the sequence and are not in the cache: no query sees their
            keys, and the results of these rows are arbitrary finite numbers.
        positions: int64 [num_reqs, num_new], logical positions of the new rows (context + depth in a tree). Ignored
            without a mask: row j is then at num_context + j.
        mask_words: int64 [num_reqs, num_query, ceil(num_new / 64)], new rows that each query sees, as packed by
            `kernels.tree.reference.pack_mask`. A query sees itself at least, and bits from num_new on are zero. None
            means causal.
        scaling: logits are scaling * q @ k; above 0.
        sliding_window: keys at a logical distance of at least this are hidden; None hides no keys.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sinks: [num_heads] logits of an extra key without a value (gpt-oss).
        out: [num_reqs, num_query, num_heads, value_dim] buffer for the result; None allocates a new one.
        workspace: float32 scratch on CUDA, see `wingbeat.kernels.gpu.attention.splits.workspace_size`.
        alike: on CUDA, makes the bits of a row independent of the batch. The bits are the same whether the row is
            alone, in a chunk, or at the end of its path in a tree of at most 64 nodes.

    Returns:
        [num_reqs, num_query, num_heads, value_dim] in the query's dtype.

    Raises:
        ValueError: an argument has a shape, dtype or value other than the above.
    """
    _check_arguments(
        query, key_cache, value_cache, block_tables, num_context, positions, mask_words, scaling, sliding_window,
        softcap, sinks, out,
    )  # fmt: skip
    is_narrow = max(query.shape[3], value_cache.shape[3]) <= MAX_HEAD_DIM
    if not is_narrow and values_in_keys(key_cache, value_cache):
        is_narrow = value_cache.shape[3] <= MAX_VALUE_DIM
    if is_narrow and (kernels := choice.compiled("attention", query)):
        return kernels.tree_attention(
            query,
            key_cache,
            value_cache,
            block_tables,
            num_context,
            positions,
            mask_words,
            scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            workspace=workspace,
            alike=alike,
        )
    num_reqs, num_query = query.shape[:2]
    if mask_words is None:
        positions = num_context[:, None] + torch.arange(num_query, device=query.device)
        visible = torch.ones(num_query, num_query, dtype=torch.bool, device=query.device).tril()
        visible = visible.expand(num_reqs, -1, -1)
    else:
        visible = unpack_mask(mask_words, positions.shape[1])
    num_keys = block_tables.shape[1] * key_cache.shape[1]
    mask = context_mask(positions, num_context, visible, num_keys, sliding_window, query.dtype)
    result = paged_attention(query, key_cache, value_cache, block_tables, mask, scaling, softcap, sinks)
    return result if out is None else out.copy_(result)


def values_in_keys(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the values are the first elements of the keys, in the same memory."""
    return key_cache.data_ptr() == value_cache.data_ptr() and key_cache.shape[3] > value_cache.shape[3]


def _check_arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    positions: Tensor | None,
    mask_words: Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> None:
    """Rejects arguments that the kernels would misread or read out of bounds.

    Checks shapes and dtypes, but not the values in tensors.
    """
    num_reqs, num_query, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = key_cache.shape[2], value_cache.shape[3]
    if query.dtype not in _FLOATS:
        raise ValueError(f"query is {query.dtype}: it must be one of {', '.join(map(str, _FLOATS))}")
    if key_cache.shape[3] != key_dim or key_cache.shape[:3] != value_cache.shape[:3] or num_heads % num_kv_heads:
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} do not fit query "
            f"{tuple(query.shape)}"
        )
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("key_cache and value_cache must be contiguous in their last dimension")
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (query.dtype, _FP8):
        raise ValueError(
            f"caches are {key_cache.dtype} and {value_cache.dtype}: both must be {query.dtype}, the query's, or {_FP8}"
        )
    if block_tables.dtype != torch.int64 or block_tables.shape[0] != num_reqs or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables is {block_tables.dtype} {tuple(block_tables.shape)}: int64 [{num_reqs}, n] needed"
        )
    if num_context.dtype != torch.int64 or num_context.shape != (num_reqs,) or not num_context.is_contiguous():
        raise ValueError(f"num_context is {num_context.dtype} {tuple(num_context.shape)}: int64 [{num_reqs}] needed")
    if mask_words is not None:
        if positions is None or positions.shape[0] != num_reqs or positions.shape[1] < num_query:
            shape = None if positions is None else tuple(positions.shape)
            raise ValueError(f"positions is {shape}: ({num_reqs}, at least {num_query}) needed with mask_words")
        expected = (num_reqs, num_query, -(-positions.shape[1] // 64))
        if mask_words.shape != expected or mask_words.dtype != torch.int64 or mask_words.stride(2) != 1:
            raise ValueError(f"mask_words is {mask_words.dtype} {tuple(mask_words.shape)}: int64 {expected} needed")
        if positions.dtype != torch.int64 or positions.stride(1) != 1:
            raise ValueError(f"positions is {positions.dtype} {tuple(positions.shape)}: contiguous int64 rows needed")
    if scaling <= 0 or (softcap is not None and softcap <= 0) or (sliding_window is not None and sliding_window < 1):
        raise ValueError(f"scaling {scaling}, softcap {softcap} and sliding_window {sliding_window} must be above 0")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks is {tuple(sinks.shape)}: ({num_heads},) needed")
    expected = (num_reqs, num_query, num_heads, value_dim)
    if out is not None and (out.shape != expected or out.dtype != query.dtype or out.stride(3) != 1):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: {query.dtype} {expected} needed")


def context_mask(
    positions: Tensor,
    num_context: Tensor,
    visible: Tensor,
    num_keys: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Builds the additive mask of the last num_query new rows over the committed context and the new rows.

    Args:
        positions: int64 [num_reqs, num_new], logical positions (context + depth in a tree) of the new rows; the queries
            are the last num_query of them.
        num_context: int64 [num_reqs], committed tokens before the first new row; row j is stored at num_context + j.
        visible: bool [num_reqs, num_query, num_new], new rows that each query attends to, itself included.
        num_keys: keys in the gathered context, at least num_context + num_new.
        sliding_window: keys at a logical distance of at least this are hidden; None hides no keys.

    Returns:
        [num_reqs, num_query, num_keys] in `dtype`: 0 for visible keys, the most negative finite value for hidden ones.
    """
    num_reqs, num_query, num_new = visible.shape
    keys = torch.arange(num_keys, device=positions.device)
    # [num_reqs, num_keys]: index among the new rows; -1 for context, num_new for keys past the new rows.
    relative = (keys - num_context[:, None]).clamp(-1, num_new)
    padded = F.pad(visible, (1, 1))
    padded[..., 0] = True
    shown = padded.gather(2, (relative + 1)[:, None, :].expand(num_reqs, num_query, num_keys))
    if sliding_window is not None:
        past = F.pad(positions, (0, 1))
        new = past.gather(1, relative.clamp_min(0))
        key_positions = torch.where(relative < 0, keys, new)
        query_positions = positions if num_query == num_new else positions[:, num_new - num_query :]
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
) -> Tensor:
    """Attends to the cached keys and values of each request under a dense mask.

    Args:
        query: [num_reqs, num_query, num_heads, key_dim].
        key_cache: [num_blocks, block_size, num_kv_heads, key_dim]; `value_cache` likewise with value_dim.
        block_tables: int64 [num_reqs, num_table_blocks].
        mask: additive [num_reqs, num_query, num_keys].
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sinks: [num_heads] logits of an extra key without a value (gpt-oss).

    Returns:
        [num_reqs, num_query, num_heads, value_dim].
    """
    key, value = read_kv(key_cache, value_cache, block_tables, query.dtype)
    return masked_attention(query, key, value, mask, scaling, softcap, sinks)


def read_kv(key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gathers the keys and values of each request, [num_reqs, num_keys, num_kv_heads, dim] each.

    Args:
        key_cache: as for `paged_attention`; `value_cache` and `block_tables` likewise.
        dtype: dtype of the result; a float8_e4m3fn cache is widened to `dtype`.
    """
    key = _blocks_of(key_cache, block_tables).to(dtype)
    if values_in_keys(key_cache, value_cache):
        return key, key[..., : value_cache.shape[3]]
    return key, _blocks_of(value_cache, block_tables).to(dtype)


def _blocks_of(cache: Tensor, block_tables: Tensor) -> Tensor:
    if cache.dtype == _FP8:
        # torch cannot index float8 on every device, so the bytes are indexed.
        return _blocks_of(cache.view(torch.uint8), block_tables).view(_FP8)
    # An embedding lookup is torch's fastest way to gather blocks.
    blocks = F.embedding(block_tables, cache.flatten(1))
    return blocks.view(len(block_tables), -1, *cache.shape[2:])


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention over dense keys [num_reqs, num_keys, num_kv_heads, dim].

    Other arguments: `paged_attention`.
    """
    num_kv_heads = key.shape[2]
    group, num_query = query.shape[2] // num_kv_heads, query.shape[1]
    # The query heads of a group share keys, so the queries of these heads become rows of one tile, head by head.
    tiles = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = mask[:, None].repeat(1, 1, group, 1)
    out = _attend_tiles(tiles, key.transpose(1, 2), value.transpose(1, 2), mask, scaling, softcap, sinks)
    return out.unflatten(2, (group, num_query)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_tiles(
    tiles: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends from [num_reqs, num_kv_heads, rows, dim] to keys [num_reqs, num_kv_heads, num_keys, dim]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(tiles, key, value, attn_mask=mask, scale=scaling)
    logits = (tiles @ key.transpose(2, 3)) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = (logits + mask).float()
    if sinks is not None:
        sink = sinks.view(1, key.shape[1], -1, 1).float()
        sink = sink.repeat_interleave(tiles.shape[2] // sink.shape[2], dim=2).expand(len(tiles), -1, -1, -1)
        logits = torch.cat([logits, sink], dim=-1)
    return torch.softmax(logits, dim=-1)[..., : key.shape[2]].to(value.dtype) @ value
