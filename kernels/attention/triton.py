"""Attention of query rows over a paged KV cache on a GPU: prompt chunks, plain decodes and token trees in one kernel.

The context is split over programs until they fill the device; a second kernel merges the splits by their log-sum-exp
(Flash-Decoding, Dao et al. 2023). The grid depends on shapes alone, never on device data, so a launch can be captured
in a CUDA graph and replayed with other lengths. Reference: `wingbeat.kernels.attention.reference`.
"""

import torch
import triton
from torch import Tensor

from wingbeat.kernels.attention.kernel import tree_attention_kernel
from wingbeat.kernels.attention.splits import (
    MAX_SPLITS,
    choose_num_splits,
    merge_splits_kernel,
    num_sms,
    workspace_size,
)
from wingbeat.kernels.attention.tiles import TileConfig, tile_config


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
    config: TileConfig | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """See `wingbeat.kernels.attention.reference.tree_attention`, which checks the arguments.

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
        device_programs = (num_sms(query.device.index or 0) if query.is_cuda else 1) * config.programs_per_sm
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
        tree_attention_kernel[(num_programs, num_splits)](
            query,
            key_cache,
            value_cache,
            block_tables,
            num_context,
            None if causal or sliding_window is None else positions,
            mask_words,
            sinks,
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
            merge_splits_kernel[(num_reqs * num_query, num_heads)](
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
