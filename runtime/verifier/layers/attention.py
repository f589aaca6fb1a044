"""Registers the attention function "wingbeat", through which transformers' modeling code uses the paged KV cache."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.kv.reference import store_kv
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.round.rows import ROWS_KEYWORD, PackedSegments, Rows, Segment
from wingbeat.runtime.verifier.layers.query_scales import SCALES, scaled

ATTENTION_NAME = "wingbeat"
WINDOW_ATTRIBUTE = "wingbeat_window"
"""Name of the attribute in which the probe stores an attention module's sliding window, derived from the module's mask.
"""


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
    """Stores the new KV, then attends segment by segment.

    Arguments follow transformers' attention interface: query [1, num_heads, num_tokens, key_dim]; key and value have
    the same layout.

    Returns:
        Output [1, num_tokens, num_heads, value_dim], and None for the attention weights.
    """
    rows: Rows = kwargs[ROWS_KEYWORD]
    own = rows.of_layer(module.layer_idx)
    sliding_window = module.__dict__.get(WINDOW_ATTRIBUTE, sliding_window)
    key_cache, value_cache = rows.caches[module.layer_idx]
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    store_kv(key, value, key_cache, value_cache, own.slot_mapping)
    if rows.captured is not None and module.layer_idx in rows.captured:
        rows.captured[module.layer_idx] = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    query = query[0].transpose(0, 1)
    if (scales := module._buffers.get(SCALES)) is not None:
        query = scaled(query, scales, rows.positions[0])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend_segments(
        query,
        key_cache,
        value_cache,
        own.segments,
        scaling,
        sliding_window=sliding_window or 0,
        softcap=softcap,
        sinks=s_aux,
        packed=own.packed,
    )
    # Some models call view() on the output, which is contiguous in transformers' own functions.
    return out[None].contiguous(), None


def attend_segments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: list[Segment],
    scaling: float,
    *,
    packed: PackedSegments | None = None,
    **options: Any,
) -> Tensor:
    """Computes attention of a flattened batch whose KV is already stored: [num_tokens, num_heads, dim] in and out.

    Args:
        packed: the segments, packed for a runtime part's kernels; if None, the segments are packed here if a runtime
            part can do so.
        options: options of `attend_in_blocks`.
    """
    if not value_cache.is_contiguous():  # the values lie in the keys, which runtime parts do not support
        packed = None
    elif packed is None and query.dtype == key_cache.dtype:
        packed = first_result("pack_segments", segments, key_cache.dtype)
    if packed is not None:
        return packed.attend(query, key_cache, value_cache, scaling, **options)
    return attend_in_blocks(query, key_cache, value_cache, segments, scaling, **options)


def attend_in_blocks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: list[Segment],
    scaling: float,
    *,
    sliding_window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Computes `attend_segments` with Triton kernels on CUDA, and with torch operations on other devices."""
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.num_reqs * segment.num_query)
        shape = (segment.num_reqs, segment.num_query)
        own_query, own_out = query[rows], out[rows]
        if segment.row_starts is not None:
            index, real = _padded(segment)
            own_query, own_out = query[index], query.new_empty(len(index), *out.shape[1:])
        tree_attention(
            own_query.unflatten(0, shape),
            key_cache,
            value_cache,
            segment.block_tables,
            segment.num_context,
            segment.positions,
            segment.mask_words,
            scaling,
            sliding_window=sliding_window or None,
            softcap=softcap,
            sinks=sinks,
            out=own_out.unflatten(0, shape),
            alike=alike,
        )
        if segment.row_starts is not None:
            out[index[real]] = own_out[real]
    return out


def _padded(segment: Segment) -> tuple[Tensor, Tensor]:
    """Pads trees of unequal width to a common width.

    Returns row indices int64 [n], and a mask bool [n] that is True for real rows. Padding rows have an arbitrary valid
    index.
    """
    starts, ends = segment.row_starts[:-1, None], segment.row_starts[1:, None]
    rows = starts + torch.arange(segment.num_query)
    return (segment.start + rows.clamp_max(ends - 1)).flatten(), (rows < ends).flatten()


AttentionInterface.register(ATTENTION_NAME, wingbeat_attention)
