"""A decode round that belongs to no request: for warm-ups and measurements."""

import torch

from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.layers.attention import AttentionMetadata, build_segment, pack_segments
from wingbeat.runtime.verifier.model import ForwardBatch


def dummy_decode_batch(
    cache: KVCache,
    windows: tuple[int, ...],
    num_reqs: int,
    num_nodes: int,
    width: int,
    table_width: int | None = None,
    in_place: bool = False,
    dtype: torch.dtype | None = None,
) -> ForwardBatch:
    """Chains of `num_nodes` for `num_reqs` sequences; reads and writes block 0, which belongs to nobody.

    Args:
        windows: sliding windows of the model's layers; 0 stands for none.
        width: blocks of context per sequence.
        in_place: the CPU's kernels attend, as in an engine's own rounds.
        dtype: of masks, which is that of the weights; None is that of the pool.
        table_width: blocks of the table that `width` is cut from; the strides are those of an engine's own.
    """
    key_cache = cache.layers[0][0]
    device, dtype = key_cache.device, dtype or key_cache.dtype
    tables = torch.zeros(num_reqs, table_width or width, dtype=torch.int64, device=device)[:, :width]
    context = torch.full((num_reqs,), max(width * cache.block_size - num_nodes, 0), dtype=torch.int64, device=device)
    positions = context[:, None] + torch.arange(num_nodes, device=device)
    visible = torch.ones(num_reqs, num_nodes, num_nodes, dtype=torch.bool, device=device).tril()
    segment = build_segment(
        0,
        positions,
        context,
        None if in_place else visible,
        tables,
        cache.block_size,
        windows,
        dtype,
        in_place=in_place,
    )
    positions = positions.flatten()
    nothing = torch.zeros_like(positions)
    packed = pack_segments([segment]) if in_place else None
    metadata = AttentionMetadata(cache.layers, nothing, [segment], packed=packed)
    return ForwardBatch(nothing[None], positions[None], None, metadata)
