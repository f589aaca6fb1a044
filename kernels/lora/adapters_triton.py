"""LoRA adapters on a GPU: two launches per matrix product.

Grids depend on shapes alone, and adapter ids are read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.lora.stacked_adapters import TILE_ROWS, StackedAdapters, Tiles

_INPUTS_TILE = 64
_OUTPUTS_TILE = 64
_NUM_PROGRAMS = 264
"""Target number of programs of a launch: enough to fill a large GPU twice."""
_LEAST_STEPS, _MOST_SPLITS = 4, 32


@triton.jit
def _shrink_kernel(
    x_ptr,  # [num_rows, inputs]
    a_ptr,  # [num_adapters, inputs, NUM_PARTS * RANK]
    ranks_ptr,  # int64 [num_adapters + 1]
    low_ptr,  # float32 [splits, num_rows, NUM_PARTS * RANK]
    order_ptr,  # int64 [num_rows]
    ids_ptr,  # int64 [num_tiles]
    begins_ptr,
    ends_ptr,
    inputs,
    of_split,  # number of inputs that a program sums
    stride_adapter,
    stride_input,
    stride_split,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    adapter = tl.load(ids_ptr + tile)
    if adapter == 0:
        return
    if tl.load(ranks_ptr + adapter) == 0:
        return
    place = tl.load(begins_ptr + tile) + tl.arange(0, ROWS)
    is_row = place < tl.load(ends_ptr + tile)
    row = tl.load(order_ptr + place, mask=is_row, other=0)
    column = tl.arange(0, BLOCK_RANK)
    is_column = column < RANK
    at = tl.arange(0, BLOCK_INPUTS)
    weights = a_ptr + (adapter - 1) * stride_adapter + part * RANK
    low = tl.zeros((ROWS, BLOCK_RANK), dtype=tl.float32)
    first = tl.program_id(2) * of_split
    for begin in range(first, tl.minimum(first + of_split, inputs), BLOCK_INPUTS):
        inside = begin + at < inputs
        x = tl.load(x_ptr + row[:, None] * inputs + begin + at[None, :], is_row[:, None] & inside[None, :], other=0.0)
        a = tl.load(
            weights + (begin + at).to(tl.int64)[:, None] * stride_input + column[None, :],
            mask=inside[:, None] & is_column[None, :],
            other=0.0,
        )
        low = tl.dot(x, a, acc=low, input_precision="ieee")
    to = low_ptr + tl.program_id(2) * stride_split + row[:, None] * (NUM_PARTS * RANK) + part * RANK + column[None, :]
    tl.store(to, low, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _expand_kernel(
    low_ptr,  # float32 [SPLITS, num_rows, NUM_PARTS * RANK]
    b_ptr,  # [num_adapters, RANK, outputs]
    ranks_ptr,  # int64 [num_adapters + 1]
    out_ptr,  # [num_rows, outputs]
    order_ptr,  # int64 [num_rows]
    ids_ptr,  # int64 [num_tiles]
    begins_ptr,
    ends_ptr,
    outputs,
    first_end,
    second_end,
    stride_adapter,
    stride_rank,
    stride_split,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(2)
    adapter = tl.load(ids_ptr + tile)
    if adapter == 0:
        return
    if tl.load(ranks_ptr + adapter) == 0:
        return
    begin = tl.where(part == 0, 0, tl.where(part == 1, first_end, second_end))
    end = tl.where(part == 0, first_end, tl.where(part == 1, second_end, outputs))
    column = begin + tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_column = column < end
    place = tl.load(begins_ptr + tile) + tl.arange(0, ROWS)
    is_row = place < tl.load(ends_ptr + tile)
    row = tl.load(order_ptr + place, mask=is_row, other=0)
    at = tl.arange(0, BLOCK_RANK)
    is_rank = at < RANK
    from_low = low_ptr + row[:, None] * (NUM_PARTS * RANK) + part * RANK + at[None, :]
    low = tl.zeros((ROWS, BLOCK_RANK), dtype=tl.float32)
    for split in range(SPLITS):  # fixed order, for reproducible sums
        low += tl.load(from_low + split * stride_split, mask=is_row[:, None] & is_rank[None, :], other=0.0)
    b = tl.load(
        b_ptr + (adapter - 1) * stride_adapter + at[:, None] * stride_rank + column[None, :],
        mask=is_rank[:, None] & is_column[None, :],
        other=0.0,
    )
    to = out_ptr + row[:, None] * outputs + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    total += tl.dot(low.to(b.dtype), b, input_precision="ieee")
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_adapters(out: Tensor, x: Tensor, adapters: StackedAdapters, tiles: Tiles) -> Tensor:
    """Launches the kernels for `wingbeat.kernels.lora.adapters.add_adapters`.

    Raises:
        ValueError: rows are not contiguous, a dtype differs, or there are more than three parts.
    """
    a, b, parts, rank = adapters.a, adapters.b, adapters.parts, adapters.rank
    for name, tensor in (("out", out), ("x", x)):
        if not tensor.is_contiguous() or tensor.dtype != b.dtype:
            raise ValueError(f"{name} is {tensor.dtype} with strides {tensor.stride()}: contiguous {b.dtype} needed")
    if len(parts) > 3 or a.stride(2) != 1 or b.stride(2) != 1:
        raise ValueError(
            f"adapters have {len(parts)} parts, strides {a.stride()}, {b.stride()}: 3 at most, last stride 1"
        )
    if not len(x):
        return out
    of_split, splits = shares(x.shape[1], len(tiles.ids) * len(parts))
    low = torch.empty(splits, len(x), len(parts) * rank, dtype=torch.float32, device=x.device)
    where = (tiles.order, tiles.ids, tiles.begins, tiles.ends)
    shared = {
        "RANK": rank,
        "NUM_PARTS": len(parts),
        "ROWS": TILE_ROWS,
        "BLOCK_RANK": max(16, triton.next_power_of_2(rank)),
    }
    num_tiles, ends = len(tiles.ids), [sum(parts[: index + 1]) for index in range(len(parts))]
    with torch.cuda.device_of(x):
        _shrink_kernel[(num_tiles, len(parts), splits)](
            x,
            a,
            adapters.ranks,
            low,
            *where,
            x.shape[1],
            of_split,
            a.stride(0),
            a.stride(1),
            low.stride(0),
            **shared,
            BLOCK_INPUTS=_INPUTS_TILE,
            **options(fused=True),
        )
        _expand_kernel[(num_tiles, triton.cdiv(max(parts), _OUTPUTS_TILE), len(parts))](
            low,
            b,
            adapters.ranks,
            out,
            *where,
            out.shape[1],
            ends[0],
            ends[1] if len(parts) > 1 else ends[0],
            b.stride(0),
            b.stride(1),
            low.stride(0),
            SPLITS=splits,
            **shared,
            BLOCK_OUTPUTS=_OUTPUTS_TILE,
            **options(fused=True),
        )
    return out


def shares(inputs: int, num_programs: int) -> tuple[int, int]:
    """Returns the number of inputs of each program, and the number of programs that share a product's inputs.

    Each program gets at least one input.
    """
    num_tiles = triton.cdiv(inputs, _INPUTS_TILE)
    splits = max(min(_NUM_PROGRAMS // num_programs, num_tiles // _LEAST_STEPS, _MOST_SPLITS), 1)
    of_split = triton.cdiv(num_tiles, splits)
    return of_split * _INPUTS_TILE, triton.cdiv(num_tiles, of_split)
