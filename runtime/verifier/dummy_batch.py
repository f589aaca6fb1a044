"""A decode round that belongs to no request: for warm-ups and measurements."""

import torch

from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.attention import AttentionMetadata, build_segment
from wingbeat.runtime.verifier.model import ForwardBatch


def dummy_decode_batch(
    cache: KVCache,
    windows: tuple[int, ...],
    num_reqs: int,
    num_nodes: int,
    width: int,
    table_width: int | None = None,
) -> ForwardBatch:
    """Chains of `num_nodes` for `num_reqs` sequences; reads and writes block 0, which belongs to nobody.

    Args:
        windows: sliding windows of the model's layers; 0 stands for none.
        width: blocks of context per sequence.
        table_width: blocks of the table that `width` is cut from; the strides are those of an engine's own.
    """
    key_cache = cache.layers[0][0]
    device, dtype = key_cache.device, key_cache.dtype
    tables = torch.zeros(num_reqs, table_width or width, dtype=torch.int64, device=device)[:, :width]
    context = torch.full((num_reqs,), max(width * cache.block_size - num_nodes, 0), dtype=torch.int64, device=device)
    positions = context[:, None] + torch.arange(num_nodes, device=device)
    visible = torch.ones(num_reqs, num_nodes, num_nodes, dtype=torch.bool, device=device).tril()
    segment = build_segment(0, positions, context, visible, tables, cache.block_size, windows, dtype)
    positions = positions.flatten()
    nothing = torch.zeros_like(positions)
    metadata = AttentionMetadata(cache.layers, nothing, [segment])
    return ForwardBatch(nothing[None], positions[None], None, metadata)
