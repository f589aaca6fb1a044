"""Writes into a paged KV cache: the torch reference, and the CPU path."""

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, kv_slots: Tensor) -> None:
    """Write one layer's new keys and values into their slots.

    Args:
        key: [num_tokens, num_kv_heads, key_dim]; `value` likewise with value_dim.
        key_cache: [num_blocks, block_size, num_kv_heads, key_dim]; `value_cache` likewise.
        kv_slots: int64 [num_tokens], block id * block_size + offset; rows to drop point into block 0.
    """
    key_cache.flatten(0, 1).index_copy_(0, kv_slots, key)
    value_cache.flatten(0, 1).index_copy_(0, kv_slots, value)


def move_kv(caches: list[tuple[Tensor, Tensor]], from_slots: Tensor, to_slots: Tensor) -> None:
    """Compact an accepted path over all layers: copy slot to slot; reads finish before writes begin.

    Args:
        caches: (key_cache, value_cache) per layer, as in `store_kv`.
        from_slots: int64 [num_moves]; `to_slots` likewise. Moves into block 0 are dropped ones.
    """
    for key_cache, value_cache in caches:
        for cache in (key_cache.flatten(0, 1), value_cache.flatten(0, 1)):
            cache.index_copy_(0, to_slots, cache.index_select(0, from_slots))
