"""Batch-invariant matrix product on a GPU.

The weight is the left operand, so that few rows fill a matrix instruction as well as many rows do. A program sums a
tile over one split of the inputs, and the last program to finish adds the splits in order. If the tiles alone fill the
device, each program computes all splits of its tile and adds them in the same order. The matrix instruction and the
inputs per step are the same for every number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.alike.product import STEP, AlikeWeight
from wingbeat.kernels.gpu.attention.device import KNOWN, device_limits
from wingbeat.kernels.launching import options, wait_for_launch

_FEW_ROWS = 64
_OUT_TILE, _LARGE_TILE = 64, 128
"""Columns of a program's tile, for few and for many rows."""
_LEAST_ROWS = 16
_PROGRAMS_OF_SM = 3
_LEAST_STEPS = 8
"""Minimum number of steps in a split."""


@triton.jit(do_not_specialize=["num_rows"])
def _alike_product_kernel(
    inputs_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]
    bias_ptr,  # [out_features], or None
    sums_ptr,  # float32 [tiles of rows, SPLITS, out_features, ROWS]; None if a program computes all splits
    counters_ptr,  # int32 [tiles of rows * tiles of columns] or longer
    out_ptr,  # [num_rows, out_features]
    num_rows,
    in_features,
    out_features,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    # Programs that compute the same columns have adjacent ids, so that the second of two such programs finds the weight
    # in the L2 cache.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    columns = tile * OUT + tl.arange(0, OUT)
    live, real = rows < num_rows, columns < out_features
    row_ptrs = inputs_ptr + rows.to(tl.int64)[None, :] * in_features
    column_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * in_features
    num_steps = tl.cdiv(in_features, IN)
    of_split = tl.cdiv(num_steps, SPLITS)
    first = 0 if sums_ptr is None else tl.program_id(2)
    last = SPLITS if sums_ptr is None else first + 1
    total = tl.zeros([OUT, ROWS], tl.float32)
    for split in tl.range(first, last, num_stages=1):
        acc = tl.zeros([OUT, ROWS], tl.float32)
        for step in tl.range(split * of_split, tl.minimum((split + 1) * of_split, num_steps)):
            at = step * IN + tl.arange(0, IN)
            inside = at < in_features
            weight = tl.load(column_ptrs + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            inputs = tl.load(row_ptrs + at[:, None], mask=inside[:, None] & live[None, :], other=0.0)
            acc = tl.dot(weight, inputs, acc, input_precision=PRECISION)
        total += acc
    if sums_ptr is not None:
        sum_ptrs = sums_ptr + columns.to(tl.int64)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        size = out_features.to(tl.int64) * ROWS
        sum_ptrs += tl.program_id(0) * SPLITS * size
        counters_ptr += tl.program_id(0) * tl.num_programs(1) + tile
        tl.store(sum_ptrs + first * size, total, mask=real[:, None])
        tl.debug_barrier()  # all sums of the program are stored before one thread increments the counter
        done = tl.atomic_add(counters_ptr, 1, sem="acq_rel")
        if done < SPLITS - 1:
            return
        total = tl.zeros([OUT, ROWS], tl.float32)
        for split in tl.range(SPLITS):
            total += tl.load(sum_ptrs + split * size, mask=real[:, None], other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr, 0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=real, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_features + columns[:, None]
    kept = real[:, None] & live[None, :]
    if ADD:
        total += tl.load(out_ptrs, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=kept)


def product(rows: Tensor, matrix: AlikeWeight, bias: Tensor | None, out: Tensor, add: bool) -> Tensor:
    """Launches the kernel for `AlikeWeight.product`. `rows` and `out` [num_rows, columns] must be contiguous."""
    num_rows, (columns, inputs) = len(rows), matrix.weight.shape
    if out.numel() == 0:
        return out
    splits, tile = num_splits(rows.device, columns, inputs), tile_of(num_rows, rows.dtype)
    height = min(max(triton.next_power_of_2(num_rows), _LEAST_ROWS), tile)
    tiles = triton.cdiv(num_rows, height), triton.cdiv(columns, tile)
    shared = splits_are_shared(rows.device, num_rows, tiles, splits)
    sums = rows.new_empty(tiles[0], splits, columns, height, dtype=torch.float32) if shared else None
    grid = (*tiles, splits if shared else 1)
    with torch.cuda.device_of(rows):
        _alike_product_kernel[grid](
            rows,
            matrix.weight,
            bias,
            sums,
            matrix.counters,
            out,
            num_rows,
            inputs,
            columns,
            SPLITS=splits,
            ADD=add,
            OUT=tile,
            # In float32 the operands of a step are held in registers, so a step has half as many inputs.
            IN=STEP // 2 if rows.dtype == torch.float32 else STEP,
            ROWS=height,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
            num_warps=4 if tile == _OUT_TILE else 8,
            num_stages=2 if rows.dtype == torch.float32 else 4 if tile == _OUT_TILE else 3,
            **options(fused=False),
        )
    return out


def tile_of(num_rows: int, dtype: torch.dtype) -> int:
    """Number of columns of a program's tile, which is also the maximum number of the tile's rows."""
    return _OUT_TILE if num_rows <= _FEW_ROWS or dtype == torch.float32 else _LARGE_TILE


def splits_are_shared(device: torch.device, num_rows: int, tiles: tuple[int, int], splits: int) -> bool:
    """Returns whether each split has a program of its own.

    True if rows are few, or if the tiles fill at most half of the GPU.
    """
    idle = 2 * tiles[0] * tiles[1] <= _num_sms(device) and tiles[0] <= 2  # only two tiles of rows have counters
    return splits > 1 and (num_rows <= _FEW_ROWS or idle)


def num_splits(device: torch.device, columns: int, inputs: int) -> int:
    """Number of splits of the inputs; depends only on the weight's shape and the GPU, never on the number of rows."""
    num_steps = triton.cdiv(inputs, STEP)
    wanted = _num_sms(device) * _PROGRAMS_OF_SM // triton.cdiv(columns, _OUT_TILE)
    splits = max(min(wanted, num_steps // _LEAST_STEPS), 1)
    return triton.cdiv(num_steps, triton.cdiv(num_steps, splits))


def _num_sms(device: torch.device) -> int:
    return (device_limits(device.index or 0) if device.type == "cuda" else KNOWN["H100"]).num_sms
