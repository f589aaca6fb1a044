"""A decode round that belongs to no request: for warm-ups and measurements."""

import torch

from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.layers.attention import AttentionMetadata, AttentionSegment
from wingbeat.runtime.verifier.model import ForwardBatch


def dummy_decode_batch(
    cache: KVCache,
    num_reqs: int,
    num_nodes: int,
    width: int,
) -> ForwardBatch:
    """Chains of `num_nodes` for `num_reqs` sequences; reads and writes block 0, which belongs to nobody.

    Args:
        width: blocks of context per sequence.
    """
    device = cache.layers[0][0].device
    tables = torch.zeros(num_reqs, width, dtype=torch.int64, device=device)
    context = torch.full((num_reqs,), max(width * cache.block_size - num_nodes, 0), dtype=torch.int64, device=device)
    positions = context[:, None] + torch.arange(num_nodes, device=device)
    segment = AttentionSegment.of(0, positions, context, None, tables)
    positions = positions.flatten()
    nothing = torch.zeros_like(positions)
    metadata = AttentionMetadata(cache.layers, nothing, [segment])
    return ForwardBatch(nothing[None], positions[None], None, metadata)
