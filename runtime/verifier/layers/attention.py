"""transformers' modeling code on our paged KV cache: the attention function registered under the name "wingbeat"."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from wingbeat.kernels.attention.reference import (
    context_mask,
    read_kv,
    tile_attention,
    tile_mask,
    tile_queries,
    tree_attention,
    untile,
)
from wingbeat.kernels.cpu.ops import Segments
from wingbeat.kernels.cpu.ops import segment as packed_segment
from wingbeat.kernels.kv.reference import store_kv
from wingbeat.kernels.layer.stacked_adapters import AdapterRows
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.runtime.state.round_states import RoundStates
from wingbeat.runtime.verifier.layers.cpu_kernels import cpu_kernels, reads_in_place
from wingbeat.runtime.verifier.layers.packing import Tiles

ATTENTION_NAME = "wingbeat"
METADATA_KEYWORD = "wingbeat_batch"
WINDOW_ATTRIBUTE = "wingbeat_window"
"""Of an attention module whose window the probe learned: transformers tells some only by their mask."""


class AttentionSegment(NamedTuple):
    """Rows of the flattened batch that share a shape: all decodes and trees of a round, or one prompt chunk.

    Where kernels read blocks in place, it carries what they make masks from; elsewhere dense masks.
    """

    start: int
    num_reqs: int
    num_query: int
    block_tables: Tensor
    """int64 [num_reqs, num_table_blocks]"""
    masks: dict[int, Tensor | None]
    """CPU: additive mask [num_reqs, num_query, num_keys] by sliding window, 0 standing for none; None masks nothing."""
    run: slice | None = None
    """CPU: where a single request's blocks follow one another, its keys' slots in the pool."""
    tiles: Tiles | None = None
    """CPU: where trees of unequal sizes lie without padding."""
    num_context: Tensor | None = None
    """In place: int64 [num_reqs], tokens before the first new row."""
    positions: Tensor | None = None
    """In place: int64 [num_reqs, num_new], logical positions of the new rows, of which the queries are the last."""
    mask_words: Tensor | None = None
    """In place: int64 [num_reqs, num_query, ceil(num_new / 64)], as `kernels.tree.reference.pack_mask`; None is
    causal."""
    row_starts: Tensor | None = None
    """In place on the CPU: int64 [num_reqs + 1], rows of each request behind `start`, where they are not num_query."""
    tile_masks: dict[tuple[int, int], Tensor] | None = None
    """CPU: `masks` as tiles have them, by window and heads in a group, made by the first layer that needs one."""

    def tile_mask(self, window: int, group: int) -> Tensor | None:
        """The mask of `tile_attention` in a layer of that window and so many heads in a group."""
        mask, made = self.masks[window], self.tile_masks
        if mask is None or made is None:
            return mask if mask is None else tile_mask(mask, group)
        if (window, group) not in made:
            made[window, group] = tile_mask(mask, group)
        return made[window, group]


class AttentionMetadata(NamedTuple):
    """What the attention function needs beside q, k and v; travels as a keyword of the model's forward."""

    caches: list[tuple[Tensor, Tensor]]
    """(key_cache, value_cache) by layer."""
    slot_mapping: Tensor
    """int64 [num_tokens]: where each row's KV goes."""
    segments: list[AttentionSegment]
    workspace: Tensor | None = None
    """CUDA: float32 scratch of `kernels.attention.reference.tree_attention`; allocated by each launch where None."""
    captured: dict[int, Tensor] | None = None
    """By layer that is in it: filled with the rows' keys and values [num_tokens, heads * (key_dim + value_dim)]."""
    packed: Segments | None = None
    """The segments as the CPU's kernels read them (`pack_segments`); None where masks are dense."""
    adapters: AdapterRows | None = None
    """Which adapter each row has; None where none has one."""
    states: RoundStates | None = None
    """Of layers that keep a state of their own; None for models without such."""


def pack_segments(segments: list[AttentionSegment]) -> Segments | None:
    """Segments for the CPU's kernels; None where they are not of the kind that is read in place."""
    kernels = cpu_kernels()
    if kernels is None or any(segment.num_context is None or segment.block_tables.is_cuda for segment in segments):
        return None
    kernels.use_threads(torch.get_num_threads())
    return Segments.of(
        [
            packed_segment(
                segment.start,
                segment.num_query,
                segment.block_tables,
                segment.num_context,
                segment.positions,
                segment.mask_words,
                segment.row_starts,
            )
            for segment in segments
        ]
    )


def build_segment(
    start: int,
    query_positions: Tensor,
    num_context: Tensor,
    visible: Tensor | None,
    block_tables: Tensor,
    block_size: int,
    windows: tuple[int, ...],
    dtype: torch.dtype,
    mask_words: Tensor | None = None,
    in_place: bool = False,
) -> AttentionSegment:
    """One segment for the device of its positions: masks for every window the model uses, or the words behind them.

    Args:
        start: first row of the flattened batch.
        query_positions: int64 [num_reqs, num_query], logical positions.
        num_context: int64 [num_reqs]; row j is stored at num_context + j.
        visible: bool [num_reqs, num_query, num_query], new rows each row attends to; None is causal, with row j at
            position num_context + j.
        block_tables: int64 [num_reqs, num_table_blocks].
        windows: sliding windows; 0 stands for none.
        dtype: of the masks.
        mask_words: `visible`, packed, where the caller has the words already.
        in_place: the CPU's kernels read blocks where they lie, as those of CUDA do.
    """
    num_reqs, num_query = query_positions.shape
    if query_positions.is_cuda or in_place:
        # A single row sees the context and itself, which is what causal means.
        if mask_words is None and visible is not None and num_query > 1:
            mask_words = pack_mask(visible)
        return AttentionSegment(
            start,
            num_reqs,
            num_query,
            block_tables,
            masks={},
            num_context=num_context,
            positions=query_positions,
            mask_words=mask_words,
        )
    if visible is None:
        visible = torch.ones(num_query, num_query, dtype=torch.bool).tril().expand(num_reqs, -1, -1)
    num_keys = block_tables.shape[1] * block_size
    masks = {
        window: context_mask(query_positions, num_context, visible, num_keys, window or None, dtype)
        for window in windows
    }
    return AttentionSegment(start, num_reqs, num_query, block_tables, masks, tile_masks={})


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
    sliding_window = module.__dict__.get(WINDOW_ATTRIBUTE, sliding_window)
    key_cache, value_cache = metadata.caches[module.layer_idx]
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    store_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
    if metadata.captured is not None and module.layer_idx in metadata.captured:
        metadata.captured[module.layer_idx] = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
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
        workspace=metadata.workspace,
        packed=metadata.packed,
    )
    # Some models view what they get, as transformers' own functions return it.
    return out[None].contiguous(), None


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
    workspace: Tensor | None = None,
    packed: Segments | None = None,
) -> Tensor:
    """Attention of a flattened batch whose KV is stored: [num_tokens, num_heads, dim] in and out.

    Args:
        packed: `pack_segments`, where the CPU's kernels attend.
    """
    in_place = segments[0].num_context is not None and query.dtype == key_cache.dtype
    if packed is None and in_place and reads_in_place(query.dtype, query.device):
        packed = pack_segments(segments)
    if packed is not None:
        return cpu_kernels().attend(
            query,
            key_cache,
            value_cache,
            packed,
            scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
    if query.is_cuda or segments[0].num_context is not None:
        return attend_in_blocks(
            query,
            key_cache,
            value_cache,
            segments,
            scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            workspace=workspace,
        )
    return _attend_gathered(query, key_cache, value_cache, segments, scaling, sliding_window, softcap, sinks)


def _attend_gathered(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: list[AttentionSegment],
    scaling: float,
    sliding_window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """By torch's operations over dense masks: each segment's keys and values are read out of the pool first."""
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    parts = []
    for segment in segments:
        key, value = read_kv(key_cache, value_cache, segment.block_tables, query.dtype, segment.run)
        mask = segment.tile_mask(sliding_window, group)
        shape = (segment.num_reqs, segment.num_query)
        num_rows = shape[0] * shape[1] if segment.tiles is None else len(segment.tiles.nodes)
        rows = query if len(segments) == 1 else query[segment.start : segment.start + num_rows]
        if segment.tiles is None:
            tiles = tile_queries(rows.view(*shape, *rows.shape[1:]), num_kv_heads)
            out = tile_attention(tiles, key, value, mask, scaling, softcap, sinks)
            parts.append(untile(out, segment.num_query).flatten(0, 1))
        else:
            tiles = segment.tiles.tile(rows, num_kv_heads)
            out = tile_attention(tiles, key, value, mask, scaling, softcap, sinks)
            parts.append(segment.tiles.untile(out))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_in_blocks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: list[AttentionSegment],
    scaling: float,
    *,
    sliding_window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """`attend_segments` of segments with mask words: blocks are read in place, results written side by side."""
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.num_reqs * segment.num_query)
        shape = (segment.num_reqs, segment.num_query)
        tree_attention(
            query[rows].unflatten(0, shape),
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
            out=out[rows].unflatten(0, shape),
            workspace=workspace,
        )
    return out


AttentionInterface.register(ATTENTION_NAME, wingbeat_attention)
