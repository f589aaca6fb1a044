"""transformers' modeling code on our paged KV cache: the attention function registered under the name "wingbeat"."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from wingbeat.kernels.attention import context_mask, paged_attention
from wingbeat.kernels.kv_cache import store_kv

ATTENTION_NAME = "wingbeat"
METADATA_KEYWORD = "wingbeat_batch"


class AttentionSegment(NamedTuple):
    """Rows of the flattened batch that share a shape: all decodes and trees of a round, or one prompt chunk."""

    start: int
    num_reqs: int
    num_query: int
    block_tables: Tensor
    """int64 [num_reqs, num_table_blocks]"""
    masks: dict[int, Tensor]
    """Additive mask [num_reqs, num_query, num_keys] by sliding window; 0 stands for none."""
    first_block: int | None = None
    """Where a single request's blocks follow one another: its first one."""


class AttentionMetadata(NamedTuple):
    """What the attention function needs beside q, k and v; travels as a keyword of the model's forward."""

    caches: list[tuple[Tensor, Tensor]]
    """(key_cache, value_cache) by layer."""
    kv_slots: Tensor
    """int64 [num_tokens]: where each row's KV goes."""
    segments: list[AttentionSegment]


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention as the probe saw it (`wingbeat.runtime.model_loader.probe_attention`)."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None


def build_segment(
    start: int,
    query_positions: Tensor,
    num_context: Tensor,
    visible: Tensor,
    block_tables: Tensor,
    block_size: int,
    windows: tuple[int, ...],
    dtype: torch.dtype,
) -> AttentionSegment:
    """Masks of one segment for every window the model uses; arguments as in `kernels.attention.context_mask`."""
    num_reqs, num_query = query_positions.shape
    num_keys = block_tables.shape[1] * block_size
    masks = {
        window: context_mask(query_positions, num_context, visible, num_keys, window or None, dtype)
        for window in windows
    }
    return AttentionSegment(start, num_reqs, num_query, block_tables, masks)


def wingbeat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Store the new KV, then attend segment by segment.

    Args (transformers' attention interface): query [1, num_heads, num_tokens, key_dim], key and value likewise.

    Returns:
        [1, num_tokens, num_heads, value_dim] and no weights.
    """
    metadata: AttentionMetadata = kwargs[METADATA_KEYWORD]
    key_cache, value_cache = metadata.caches[module.layer_idx]
    store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, metadata.kv_slots)
    query = query[0].transpose(0, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend_segments(
        query,
        key_cache,
        value_cache,
        metadata.segments,
        scaling,
        sliding_window=sliding_window or 0,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def attend_segments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: list[AttentionSegment],
    scaling: float,
    *,
    sliding_window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a flattened batch whose KV is stored: [num_tokens, num_heads, dim] in and out."""
    parts = []
    for segment in segments:
        end = segment.start + segment.num_reqs * segment.num_query
        rows = query[segment.start : end].unflatten(0, (segment.num_reqs, segment.num_query))
        mask = segment.masks[sliding_window]
        out = paged_attention(
            rows, key_cache, value_cache, segment.block_tables, mask, scaling, softcap, sinks, segment.first_block
        )
        parts.append(out.flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


AttentionInterface.register(ATTENTION_NAME, wingbeat_attention)
