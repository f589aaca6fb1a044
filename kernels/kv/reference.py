"""Writes to a paged KV cache: torch reference and CPU path; GPUs use `kernels.gpu.kv`."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.kv.pool_table import PoolTable

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes one layer's new keys and values into their slots; one launch on CUDA.

    Args:
        key: [num_tokens, num_kv_heads, key_dim]; `value` likewise with value_dim.
        key_cache: [num_blocks, block_size, num_kv_heads, key_dim]; `value_cache` likewise. The caches have the dtype of
            `key`, or float8_e4m3fn. In float8 all numbers are saturated at 448, because the format has only NaN past
            448.
        slot_mapping: int64 [num_tokens], block id * block_size + offset; slots in block 0 mark rows to drop.

    Raises:
        ValueError: slots are not contiguous int64. On CUDA or with float8 caches: shapes or dtypes do not match.
    """
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype}, strides {slot_mapping.stride()}: contiguous int64 needed"
        )
    # On the CPU torch checks shapes itself; these checks would take a fifth of the store's time.
    rounds = key_cache.dtype == _FP8
    if key_cache.is_cuda or rounds:
        _check_store(key, value, key_cache, value_cache, slot_mapping)
    if kernels := choice.compiled("store_kv", key_cache):
        kernels.store_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    if rounds:
        key, value = (part.float().clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).view(torch.uint8) for part in (key, value))
        # torch on the CPU can index bytes, but not float8.
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def slot_mapping(block_tables: Tensor, positions: Tensor, block_size: int, counted: Tensor | None = None) -> Tensor:
    """Maps stored positions to slots: block id * block_size + offset, int64 [num_reqs, n]; one launch on CUDA.

    Args:
        block_tables: int64 [num_reqs, num_table_blocks].
        positions: int64 [num_reqs, n]: storage index within the sequence. A position outside the table yields a slot of
            some other position, so the caller must exclude the position by `counted`.
        counted: bool [num_reqs, n]: positions that are False yield slot 0, in block 0, and are dropped; None counts
            all.
    """
    if kernels := choice.compiled("slot_mapping", positions):
        return kernels.slot_mapping(block_tables, positions, block_size, counted)
    blocks = block_tables.gather(1, (positions // block_size).clamp(0, block_tables.shape[1] - 1))
    mapping = blocks * block_size + positions % block_size
    return mapping if counted is None else torch.where(counted, mapping, 0)


def pool_table(caches: Sequence[tuple[Tensor, ...]]) -> PoolTable | None:
    """Describes caches on CUDA for `move_kv`.

    Returns None on other devices. CUDA graphs that captured a move read the table, so the caller must keep the table
    alive as long as these graphs.

    Raises:
        ValueError: a cache on CUDA is not contiguous, or on another device than the first.
    """
    kernels = choice.compiled("move_kv", caches[0][0]) if caches else None
    return None if kernels is None else kernels.pool_table(caches)


def move_kv(
    caches: Sequence[tuple[Tensor, ...]], from_slots: Tensor, to_slots: Tensor, table: PoolTable | None = None
) -> None:
    """Moves rows between slots in all layers, to compact accepted paths.

    All reads precede all writes. On CUDA this is a single launch.

    Args:
        caches: tensors per layer, such as the caches of `store_kv`; contiguous, all with one block_size.
        from_slots: int64 [num_reqs, num_moves], or [num_moves] for one request; `to_slots` likewise. Moves into block 0
            are dropped. A target of one request is never a source of another, and no two moves that are not dropped
            share a target.
        table: `pool_table` of the caches; None builds a new one.
    """
    if kernels := choice.compiled("move_kv", from_slots):
        kernels.move_kv(caches, from_slots, to_slots, table)
    else:
        copy_kv(caches, from_slots, to_slots)


def copy_kv(caches: Sequence[tuple[Tensor, ...]], from_slots: Tensor, to_slots: Tensor) -> None:
    """`move_kv` with torch operations."""
    if from_slots.dim() == 2:
        from_slots, to_slots = from_slots.flatten(), to_slots.flatten()
    for cache in chain.from_iterable(caches):
        rows = (cache.view(torch.uint8) if cache.dtype == _FP8 else cache).flatten(0, 1)
        rows.index_copy_(0, to_slots, rows.index_select(0, from_slots))


def _check_store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    for name, part, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if part.dim() != 3 or part.shape[1:] != cache.shape[2:] or part.shape[0] != len(slot_mapping):
            raise ValueError(
                f"{name} is {tuple(part.shape)}: [{len(slot_mapping)} slots, heads, dim] of its cache "
                f"{tuple(cache.shape)} needed"
            )
        if cache.stride(3) != 1:
            raise ValueError(f"{name}_cache must be contiguous in its last dimension")
        if cache.dtype not in (part.dtype, _FP8):
            raise ValueError(f"{name} is {part.dtype}, its cache {cache.dtype}: the same dtype or {_FP8} needed")
