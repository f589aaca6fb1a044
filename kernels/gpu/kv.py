"""Writes to a paged KV cache on a GPU: stores new rows of a layer, and moves accepted paths in all layers.

Also maps positions to slots.

Each function is one launch. Reference: `wingbeat.kernels.kv.reference`, whose functions select the implementation.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.kv.pool_table import PoolTable
from wingbeat.kernels.launching import options, wait_for_launch

_CHUNK_ELEMENTS = 2048
_MOVE_TILE_ELEMENTS = 8192
_MAPPING_TILE = 128
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def stored_as(row, dtype: tl.constexpr):
    """Converts numbers to a cache's dtype, saturating, because e4m3 has only NaN past its largest finite value."""
    if dtype == tl.float8e4nv:
        row = tl.minimum(tl.maximum(row.to(tl.float32), -_FP8_MAX), _FP8_MAX)
    return row.to(dtype)


@triton.jit
def _store_row(
    source_ptr,
    cache_ptr,
    slot,
    chunk,
    stride_source_token,
    stride_source_head,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    head, dim = element // DIM, element % DIM
    inside = element < NUM_HEADS * DIM
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(
        source_ptr + token * stride_source_token + head * stride_source_head + dim,
        mask=inside,
        other=0.0,
    )
    row = stored_as(row, cache_ptr.dtype.element_ty)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
    tl.store(cache_ptr + target + head * stride_head + dim, row, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _store_kv_kernel(
    key_ptr,  # [num_tokens, NUM_HEADS, KEY_DIM]
    value_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, KEY_DIM]
    value_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, VALUE_DIM]
    slot_ptr,  # int64 [num_tokens]
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_block,
    stride_key_slot,
    stride_key_cache_head,
    stride_value_block,
    stride_value_slot,
    stride_value_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    slot = tl.load(slot_ptr + tl.program_id(0))
    chunk = tl.program_id(1)
    # Slots in block 0 mark rows to drop. Such rows are not written at all, because many of them occur at once.
    if slot >= BLOCK_SIZE:
        if chunk < KEY_CHUNKS:
            _store_row(
                key_ptr,
                key_cache_ptr,
                slot,
                chunk,
                stride_key_token,
                stride_key_head,
                stride_key_block,
                stride_key_slot,
                stride_key_cache_head,
                BLOCK_SIZE,
                NUM_HEADS,
                KEY_DIM,
                CHUNK,
            )
        else:
            _store_row(
                value_ptr,
                value_cache_ptr,
                slot,
                chunk - KEY_CHUNKS,
                stride_value_token,
                stride_value_head,
                stride_value_block,
                stride_value_slot,
                stride_value_cache_head,
                BLOCK_SIZE,
                NUM_HEADS,
                VALUE_DIM,
                CHUNK,
            )


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launches the kernel for `wingbeat.kernels.kv.reference.store_kv`; rows with slots in block 0 are not written."""
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens == 0:
        return
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    chunk = min(_CHUNK_ELEMENTS, triton.next_power_of_2(num_heads * max(key_dim, value_dim)))
    key_chunks, value_chunks = (triton.cdiv(num_heads * dim, chunk) for dim in (key_dim, value_dim))
    with torch.cuda.device_of(key_cache):
        _store_kv_kernel[(num_tokens, key_chunks + value_chunks)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            BLOCK_SIZE=key_cache.shape[1],
            NUM_HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_CHUNKS=key_chunks,
            CHUNK=chunk,
            # A thread copies at most 16 bytes.
            num_warps=max(1, min(8, chunk * key.element_size() // 512)),
            **options(fused=False),
        )


@triton.jit
def address_of(table, stored, num_blocks, real, BLOCK_SIZE: tl.constexpr):
    """Slots of positions according to a row of block tables; positions outside the table use the nearest block."""
    below = -((BLOCK_SIZE - 1 - stored) // BLOCK_SIZE)
    index = tl.where(stored < 0, below, stored // BLOCK_SIZE)
    block = tl.load(table + tl.minimum(tl.maximum(index, 0), num_blocks - 1), mask=real, other=0)
    return block * BLOCK_SIZE + stored - index * BLOCK_SIZE


@triton.jit(do_not_specialize=["num_blocks", "width", "stride_table"])
def _slot_mapping_kernel(
    tables,  # int64 [num_reqs, num_blocks]
    positions,  # int64 [num_reqs, width]
    counted,  # uint8 [num_reqs, width], or None
    out,
    num_blocks,
    width,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    stored = tl.load(positions + req * width + at, mask=inside, other=0)
    address = address_of(tables + req * stride_table, stored, num_blocks, inside, BLOCK_SIZE)
    if counted is not None:
        address = tl.where(tl.load(counted + req * width + at, mask=inside, other=0) != 0, address, 0)
    tl.store(out + req * width + at, address, mask=inside)


def slot_mapping(block_tables: Tensor, positions: Tensor, block_size: int, counted: Tensor | None) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.kv.reference.slot_mapping`."""
    num_reqs, width = positions.shape
    out = positions.new_empty(num_reqs, width)
    tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    tile = min(_MAPPING_TILE, triton.next_power_of_2(max(width, 1)))
    if out.numel():
        with torch.cuda.device_of(positions):
            _slot_mapping_kernel[(num_reqs, triton.cdiv(width, tile))](
                tables,
                positions.contiguous(),
                None if counted is None else counted.contiguous().view(torch.uint8),
                out,
                tables.shape[1],
                width,
                tables.stride(0),
                BLOCK_SIZE=block_size,
                TILE=tile,
                num_warps=1,
                **options(fused=False),
            )
    return out


def pool_table(caches: Sequence[tuple[Tensor, ...]]) -> PoolTable:
    parts = [part for layer in caches for part in layer]
    device = parts[0].device
    for index, layer in enumerate(caches):
        for part in layer:
            if not part.is_contiguous() or part.device != device:
                raise ValueError(f"caches[{index}] is not contiguous, or on {part.device} where others are on {device}")
    places = [(part.data_ptr(), part.shape[2] * part.shape[3] * part.element_size()) for part in parts]
    numbers = [number for place in places for number in place]
    word_bytes = next(size for size in (8, 4, 2, 1) if all(number % size == 0 for number in numbers))
    rows = [[address, row_bytes // word_bytes] for address, row_bytes in places]
    return PoolTable(
        entries=torch.tensor(rows, dtype=torch.int64, device=device),
        word_bytes=word_bytes,
        most_words=max(words for _, words in rows),
        aligned=all(number % 16 == 0 for number in numbers),
    )


@triton.jit(
    do_not_specialize=["num_moves", "stride_from", "stride_to"],
    do_not_specialize_on_alignment=["from_ptr", "to_ptr"],
)
def _move_kv_kernel(
    entry_ptr,  # int64 [num_parts, 2]
    from_ptr,  # int64 [num_reqs, num_moves]
    to_ptr,  # int64 [num_reqs, num_moves]
    num_moves,
    stride_from,
    stride_to,
    BLOCK_SIZE: tl.constexpr,
    WORD: tl.constexpr,
    WORDS_16_BYTES: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    move = tl.arange(0, BLOCK_MOVES)
    source = tl.load(from_ptr + req * stride_from + move, mask=move < num_moves, other=0)
    target = tl.load(to_ptr + req * stride_to + move, mask=move < num_moves, other=0)
    moved = (target >= BLOCK_SIZE) & (source != target)
    if tl.sum(moved.to(tl.int32), 0) > 0:
        cache_ptr = tl.load(entry_ptr + part * 2).to(tl.pointer_type(WORD))
        num_words = tl.load(entry_ptr + part * 2 + 1)
        if WORDS_16_BYTES > 1:
            cache_ptr = tl.multiple_of(cache_ptr, 16)
            num_words = tl.multiple_of(num_words, WORDS_16_BYTES)
        word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
        inside = moved[:, None] & (word < num_words)[None, :]
        rows = tl.load(cache_ptr + source[:, None] * num_words + word[None, :], mask=inside, other=0)
        # A target may be another move's source, so all reads must precede all writes. Each word of a request's rows is
        # moved by a single program, so a barrier among this program's threads suffices.
        tl.debug_barrier()
        tl.store(cache_ptr + target[:, None] * num_words + word[None, :], rows, mask=inside)


def move_kv(
    caches: Sequence[tuple[Tensor, ...]], from_slots: Tensor, to_slots: Tensor, table: PoolTable | None = None
) -> None:
    """Launches the kernel for `wingbeat.kernels.kv.reference.move_kv`; moves into block 0 are skipped."""
    if from_slots.dim() == 1:
        from_slots, to_slots = from_slots[None], to_slots[None]
    num_reqs, num_moves = from_slots.shape
    if num_reqs == 0 or num_moves == 0 or not caches:
        return
    from_slots, to_slots = (slots if slots.stride(1) == 1 else slots.contiguous() for slots in (from_slots, to_slots))
    table = table or pool_table(caches)
    block_moves = triton.next_power_of_2(num_moves)
    longest = triton.next_power_of_2(table.most_words)
    chunk = max(1, min(_CHUNK_ELEMENTS, longest, _MOVE_TILE_ELEMENTS // (block_moves * max(table.word_bytes // 4, 1))))
    with torch.cuda.device_of(from_slots):
        _move_kv_kernel[(num_reqs, table.entries.shape[0], triton.cdiv(table.most_words, chunk))](
            table.entries,
            from_slots,
            to_slots,
            num_moves,
            from_slots.stride(0),
            to_slots.stride(0),
            BLOCK_SIZE=caches[0][0].shape[1],
            WORD={8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[table.word_bytes],
            WORDS_16_BYTES=16 // table.word_bytes if table.aligned else 1,
            BLOCK_MOVES=block_moves,
            CHUNK=chunk,
            num_warps=4,
            **options(fused=False),
        )
