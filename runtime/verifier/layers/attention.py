"""transformers' modeling code on our paged KV cache: the attention function registered under the name "wingbeat"."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.cpu.ops import Segments
from wingbeat.kernels.cpu.ops import segment as packed_segment
from wingbeat.kernels.kv.reference import store_kv
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.runtime.verifier.layers.cpu_kernels import cpu_kernels, reads_in_place

ATTENTION_NAME = "wingbeat"
METADATA_KEYWORD = "wingbeat_batch"
NO_COLUMNS: Mapping[type, Any] = {}
WINDOW_ATTRIBUTE = "wingbeat_window"
"""Of an attention module whose window the probe learned: transformers tells some only by their mask."""


class AttentionSegment(NamedTuple):
    """Rows of the flattened batch that share a shape: all decodes and trees of a round, or one prompt chunk."""

    start: int
    """First row of the flattened batch."""
    num_reqs: int
    num_query: int
    """Rows of each request; the most of any where `row_starts` says how many each has."""
    block_tables: Tensor
    """int64 [num_reqs, num_table_blocks]"""
    num_context: Tensor
    """int64 [num_reqs], tokens before the first new row; row j is stored at num_context + j."""
    positions: Tensor
    """int64 [num_reqs, num_new], logical positions of the new rows, of which the queries are the last."""
    mask_words: Tensor | None = None
    """int64 [num_reqs, num_query, ceil(num_new / 64)], as `kernels.tree.reference.pack_mask`; None is causal."""
    row_starts: Tensor | None = None
    """int64 [num_reqs + 1], rows of each request behind `start`, where they are not num_query; on the host alone."""

    @classmethod
    def of(
        cls, start: int, positions: Tensor, num_context: Tensor, visible: Tensor | None, block_tables: Tensor
    ) -> "AttentionSegment":
        """A segment whose rows see the context and, of the new rows, those that a mask shows.

        Args:
            positions: int64 [num_reqs, num_query], logical positions.
            visible: bool [num_reqs, num_query, num_query]; None is causal, with row j at position num_context + j.
        """
        # A single row sees the context and itself, which is what causal means.
        words = None if visible is None or positions.shape[1] == 1 else pack_mask(visible)
        return cls(start, *positions.shape, block_tables, num_context, positions, words)


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
    """The segments as the CPU's kernels read them (`pack_segments`); None where others attend."""
    columns: Mapping[type, Any] = NO_COLUMNS
    """What features know of the rows, by kind."""

    def with_packed(self) -> "AttentionMetadata":
        """With `packed`, where the CPU's kernels read such caches."""
        keys = self.caches[0][0]
        return self._replace(packed=pack_segments(self.segments)) if reads_in_place(keys.dtype, keys.device) else self


def pack_segments(segments: list[AttentionSegment]) -> Segments | None:
    """Segments for the CPU's kernels; None where there are none, and on other devices."""
    kernels = cpu_kernels()
    if kernels is None or segments[0].block_tables.device.type != "cpu":
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
    if packed is None and query.dtype == key_cache.dtype and reads_in_place(query.dtype, query.device):
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
    """`attend_segments` by Triton on CUDA and by torch's operations elsewhere; results are written side by side."""
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
            workspace=workspace,
        )
        if segment.row_starts is not None:
            out[index[real]] = own_out[real]
    return out


def _padded(segment: AttentionSegment) -> tuple[Tensor, Tensor]:
    """Of unequal trees padded to one width: the row of each place int64 [n], any row for padding, and bool [n] real."""
    starts, ends = segment.row_starts[:-1, None], segment.row_starts[1:, None]
    rows = starts + torch.arange(segment.num_query)
    return (segment.start + rows.clamp_max(ends - 1)).flatten(), (rows < ends).flatten()


AttentionInterface.register(ATTENTION_NAME, wingbeat_attention)
