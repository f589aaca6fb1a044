"""Matrix products of few rows with one weight on a GPU, in as many programs as fill the device.

Programs that share a tile each sum a part of the inputs; the last program to finish adds the sums in input order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.attention.device import KNOWN, DeviceLimits, device_limits
from wingbeat.kernels.launching import compiled_capability, options, wait_for_launch

_OUT_TILE, _IN_TILES = 64, (128, 64)
LEAST_HEIGHT, _MANY_ROWS = 16, 64
_MOST_STAGES = 4
_PROGRAMS_OF_SM, _LEAST_STEPS, _MOST_SPLITS = 3, 4, 16


@triton.jit
def part_of_sum(
    row_ptrs,  # [ROWS]: first input of each row
    live,  # bool [ROWS]
    weight_ptrs,  # [OUT, 1]: first weight of each column
    real,  # bool [OUT]
    norm_ptr,  # [in_features]: factors of the inputs, or None
    begin,
    end,
    in_features,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums products [OUT, ROWS] over the inputs from `begin` to `end`, and with factors the rows' squares [ROWS]."""
    acc = tl.zeros([OUT, ROWS], tl.float32)
    squares = tl.zeros([IN, ROWS], tl.float32)
    for start in tl.range(begin, end, IN):
        at = start + tl.arange(0, IN)
        known = at < in_features
        weight = tl.load(weight_ptrs + at[None, :], mask=real[:, None] & known[None, :], other=0.0)
        inputs = tl.load(row_ptrs[None, :] + at[:, None], mask=live[None, :] & known[:, None], other=0.0)
        if norm_ptr is not None:
            wide = inputs.to(tl.float32)
            squares += wide * wide
            factors = tl.load(norm_ptr + at, mask=known, other=0.0).to(tl.float32)
            inputs = (wide * factors[:, None]).to(inputs.dtype)
        acc = tl.dot(weight, inputs, acc, input_precision=PRECISION)
    return acc, tl.sum(squares, 0)


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _few_rows_product_kernel(
    rows_ptr,  # [num_rows, in_features]
    weight_ptr,  # [columns, in_features]
    bias_ptr,  # [columns], or None
    norm_ptr,  # [in_features]: weight of a norm of the rows, or None
    sums_ptr,  # float32 [splits, out_features, ROWS]; None with one split
    squares_ptr,  # float32 [tiles, splits, ROWS]; None with one split or without a norm
    counters_ptr,  # int32 [tiles]
    out_ptr,  # [num_rows, out_features]
    num_rows,
    in_features,
    out_features,
    steps,  # number of steps of a program, of IN inputs each
    eps,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    tile, split = tl.program_id(0), tl.program_id(1)
    columns, row = tile * OUT + tl.arange(0, OUT), tl.arange(0, ROWS)
    real, live = columns < out_features, row < num_rows
    begin = split * steps * IN  # a multiple of IN, so that the compiler sees aligned loads and pipelines them
    end = tl.minimum(begin + steps * IN, in_features)
    row_ptrs = rows_ptr + row * in_features
    weights = weight_ptr + columns.to(tl.int64)[:, None] * in_features
    acc, squares = part_of_sum(
        row_ptrs, live, weights, real, norm_ptr, begin, end, in_features, IN, OUT, ROWS, PRECISION
    )
    if sums_ptr is not None:
        splits = tl.num_programs(1)
        sums = sums_ptr + columns.to(tl.int64)[:, None] * ROWS + row[None, :]
        size = out_features.to(tl.int64) * ROWS
        tl.store(sums + split * size, acc, mask=real[:, None])
        if norm_ptr is not None:
            tl.store(squares_ptr + (tile * splits + split) * ROWS + row, squares)
        tl.debug_barrier()  # all sums of the program are stored before one thread increments the counter
        done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if done < splits - 1:
            return
        acc = tl.zeros([OUT, ROWS], tl.float32)
        for other in tl.range(splits):
            acc += tl.load(sums + other * size, mask=real[:, None], other=0.0, cache_modifier=".cg")
        if norm_ptr is not None:
            squares = tl.zeros([ROWS], tl.float32)
            for other in tl.range(splits):
                squares += tl.load(squares_ptr + (tile * splits + other) * ROWS + row, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    if norm_ptr is not None:
        acc *= tl.math.rsqrt(squares / in_features + eps)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=real, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    kept = real[:, None] & live[None, :]
    to = out_ptr + row.to(tl.int64)[None, :] * out_features + columns[:, None]
    if GATED:
        weights += out_features.to(tl.int64) * in_features
        up, squares = part_of_sum(
            row_ptrs, live, weights, real, norm_ptr, begin, end, in_features, IN, OUT, ROWS, PRECISION
        )
        if norm_ptr is not None:
            up *= tl.math.rsqrt(squares / in_features + eps)[None, :]
        if bias_ptr is not None:
            up += tl.load(bias_ptr + out_features + columns, mask=real, other=0.0).to(tl.float32)[:, None]
        gate = acc.to(dtype).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    if ADD:
        acc += tl.load(to, mask=kept, other=0.0).to(tl.float32)
    tl.store(to, acc.to(dtype), mask=kept)


def few_rows_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    total: Tensor | None,
    counters: Tensor,
    gated: bool,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.few_rows.product.few_rows_product`."""
    num_rows, in_features = rows.shape
    out_features = len(weight) // 2 if gated else len(weight)
    out = rows.new_empty(num_rows, out_features) if total is None else total
    if not num_rows:
        return out
    limits, height = limits_of(rows.device), max(triton.next_power_of_2(num_rows), LEAST_HEIGHT)
    tiles = triton.cdiv(out_features, _OUT_TILE)
    in_tile, num_stages = read_ahead(limits, height, rows.element_size(), squares=norm is not None)
    steps, splits = shares(limits, tiles, triton.cdiv(in_features, in_tile))
    if gated:  # not split: the tiles of a gated MLP fill the device
        steps, splits = triton.cdiv(in_features, in_tile), 1
    factors, eps = norm or (None, 0.0)
    sums = rows.new_empty(splits, out_features, height, dtype=torch.float32) if splits > 1 else None
    squares = None if sums is None or norm is None else sums.new_empty(tiles, splits, height)
    with torch.cuda.device_of(rows):
        _few_rows_product_kernel[(tiles, splits)](
            rows,
            weight,
            bias,
            factors,
            sums,
            squares,
            counters,
            out,
            num_rows,
            in_features,
            out_features,
            steps,
            eps,
            GATED=gated,
            ADD=total is not None,
            ROWS=height,
            OUT=_OUT_TILE,
            IN=in_tile,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=num_stages,
            **options(fused=True),
        )
    return out


def read_ahead(
    limits: DeviceLimits, height: int, itemsize: int, columns: int = _OUT_TILE, squares: bool = False
) -> tuple[int, int]:
    """Returns the number of inputs of a step and the number of pipeline stages, for tiles of `columns` columns. With
    these numbers two programs fit into a multiprocessor's shared memory.

    Args:
        squares: whether a program sums squares of many rows too, which take registers.
    """
    room, tiles = limits.sm_shared_bytes // 2 - 1024, _IN_TILES[1:] if squares and height >= _MANY_ROWS else _IN_TILES
    stages = [(tile, min(room // ((columns + height) * tile * itemsize), _MOST_STAGES)) for tile in tiles]
    return next(((tile, count) for tile, count in stages if count >= 2), (_IN_TILES[-1], 1))


def shares(limits: DeviceLimits, tiles: int, num_steps: int) -> tuple[int, int]:
    """Returns the numbers of steps per program and of programs per tile, such that every multiprocessor has work."""
    splits = max(min(limits.num_sms * _PROGRAMS_OF_SM // tiles, num_steps // _LEAST_STEPS, _MOST_SPLITS), 1)
    of_split = triton.cdiv(num_steps, splits)
    return of_split, triton.cdiv(num_steps, of_split)


def limits_of(device: torch.device) -> DeviceLimits:
    """Limits of the GPU. Without a GPU: limits of the GPU that kernels are compiled for, or else of an H100."""
    if device.type == "cuda":
        return device_limits(device.index or 0)
    known = {limits.capability: limits for limits in KNOWN.values()}
    return known.get(compiled_capability(), KNOWN["H100"])
