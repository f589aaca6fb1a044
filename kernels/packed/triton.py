"""Matrix products of few rows with packed weights on a GPU; weights are read once and unpacked in registers.

A program sums a tile of columns over some of the steps. If several programs share a tile, the last one to finish adds
their sums in step order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.experts.product import Routes
from wingbeat.kernels.gpu.attention.device import KNOWN, device_limits
from wingbeat.kernels.grouped_weight import E2M1, E4M3, INT8
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.packed.matrix import LEAST_TILE, PackedMatrix

_WHOLE, _SIGNED, _E4M3, _E2M1 = (tl.constexpr(code) for code in range(4))
_CODES = {INT8.name: _SIGNED, E4M3.name: _E4M3, E2M1.name: _E2M1}
"""Codes of number formats other than unsigned integers."""
_OUT_TILE = 64
_PROGRAMS_OF_SM = 3
_LEAST_STEPS = 4
"""Minimum number of steps of a program if several share a tile."""
_UNPACK_TILE = 64


@triton.jit
def _numbers(values, CODE: tl.constexpr):
    """Decodes bytes to float32 with bit operations, which run four times as fast as conversion instructions."""
    bits = values.to(tl.int32)
    if CODE == _WHOLE:
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    if CODE == _SIGNED:
        return ((bits ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    # Exponent and mantissa are shifted to their float32 positions; a power of two corrects the exponent, for subnormals
    # too.
    if CODE == _E4M3:
        return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * 1.7014118346046923e38


@triton.jit
def _scales_at(numbers_ptr, by_ptr, group, columns, real, stride, OF_BY: tl.constexpr):
    """Float32 scales of a group for some columns."""
    scales = tl.load(numbers_ptr + group * stride + columns, mask=real, other=0).to(tl.float32)
    if by_ptr is not None:
        scales *= tl.load(by_ptr + (group // OF_BY) * stride + columns, mask=real, other=0).to(tl.float32)
    return scales


@triton.jit
def _unpacked(
    values,
    numbers_ptr,
    by_ptr,
    minima_ptr,
    minima_by_ptr,
    zeros_ptr,
    offset,
    group,
    columns,
    real,
    stride,
    CODE: tl.constexpr,
    OF_BY: tl.constexpr,
):
    """Dequantizes bytes [columns, bytes] that all belong to one group to float32."""
    scales = _scales_at(numbers_ptr, by_ptr, group, columns, real, stride, OF_BY)
    if minima_ptr is not None:
        shifts = _scales_at(minima_ptr, minima_by_ptr, group, columns, real, stride, OF_BY)
    elif zeros_ptr is not None:
        shifts = -scales * tl.load(zeros_ptr + group * stride + columns, mask=real, other=0).to(tl.float32)
    else:
        shifts = scales * offset
    return tl.fma(_numbers(values, CODE), scales[:, None], shifts[:, None])


@triton.jit(do_not_specialize=["num_rows", "offset", "out_features", "stride"])
def _packed_product_kernel(
    inputs_ptr,  # [num_rows, in_features]
    values_ptr,  # uint8 [steps, columns, BYTES]
    numbers_ptr,  # [groups, columns]
    by_ptr,  # float16 [groups / OF_BY, columns], or None; minima_by likewise
    minima_ptr,
    minima_by_ptr,
    zeros_ptr,  # [groups, columns], or None
    bias_ptr,  # [columns], or None
    sums_ptr,  # float32 [SPLITS, columns, num_rows], or None
    counters_ptr,  # int32 [tiles]
    order_ptr,  # int64 [num_rows], rows sorted by expert; None: all rows have the same weight
    blocks_ptr,  # int32 [3, blocks]: expert, and first and last index of the block's rows in `order_ptr`
    out_ptr,  # [num_rows, columns]
    offset,
    num_rows,
    in_features,
    out_features,
    num_steps,
    stride,  # number of columns in memory from one step or group to the next
    out_stride,
    GROUP: tl.constexpr,
    OF_BY: tl.constexpr,
    CODE: tl.constexpr,
    HALVES: tl.constexpr,
    BYTES: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    stride = stride.to(tl.int64)  # offsets of many experts exceed 32 bits
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns, rows = tile * OUT + tl.arange(0, OUT), tl.arange(0, ROWS)
    real, out_columns = columns < out_features, columns
    if order_ptr is None:
        live = rows < num_rows
    else:
        num_blocks = tl.num_programs(2)
        expert = tl.load(blocks_ptr + block)
        places = rows + tl.load(blocks_ptr + num_blocks + block)
        live = places <= tl.load(blocks_ptr + 2 * num_blocks + block)
        if expert < 0:
            return
        columns += expert * out_features
        rows = tl.load(order_ptr + places, mask=live, other=0)
    at_bytes = tl.arange(0, BYTES)
    row_ptrs = inputs_ptr + (rows // CHOICES).to(tl.int64)[None, :] * in_features
    acc = tl.zeros([OUT, ROWS], tl.float32)
    of_split = tl.cdiv(num_steps, SPLITS)
    byte_ptrs = values_ptr + columns.to(tl.int64)[:, None] * BYTES + at_bytes[None, :]
    byte_ptrs += split * of_split * stride * BYTES
    for step in tl.range(split * of_split, tl.minimum((split + 1) * of_split, num_steps)):
        values = tl.load(byte_ptrs, mask=real[:, None], other=0)
        byte_ptrs += stride * BYTES
        for half in tl.static_range(HALVES):
            begin = (step * HALVES + half) * BYTES
            known = real & (0 * columns + begin < in_features)  # the second half of the last step may be padding
            part = values if HALVES == 1 else (values >> (4 * half)) & 15
            weight = _unpacked(
                part, numbers_ptr, by_ptr, minima_ptr, minima_by_ptr, zeros_ptr, offset, begin // GROUP, columns,
                known, stride, CODE, OF_BY,
            )  # fmt: skip
            at = begin + at_bytes
            inside = live[None, :] & (at < in_features)[:, None]
            inputs = tl.load(row_ptrs + at[:, None], mask=inside, other=0.0)
            acc = tl.dot(weight.to(inputs.dtype), inputs, acc, input_precision=PRECISION)
    if SPLITS > 1:
        sum_ptrs = sums_ptr + columns.to(tl.int64)[:, None] * ROWS + rows[None, :]
        size = out_features.to(tl.int64) * ROWS
        tl.store(sum_ptrs + split * size, acc, mask=real[:, None])
        tl.debug_barrier()  # all sums of the program are stored before one thread increments the counter
        done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if done < SPLITS - 1:
            return
        acc = tl.zeros([OUT, ROWS], tl.float32)
        for other in tl.range(SPLITS):
            acc += tl.load(sum_ptrs + other * size, mask=real[:, None], other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=real, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_stride + out_columns[:, None]
    kept = real[:, None] & live[None, :]
    if ADD:
        acc += tl.load(out_ptrs, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["offset", "stride"])
def _unpack_kernel(
    values_ptr,
    numbers_ptr,
    by_ptr,
    minima_ptr,
    minima_by_ptr,
    zeros_ptr,
    chosen_ptr,  # int64 [num_columns], or None
    out_ptr,  # [num_columns, in_features]
    offset,
    num_columns,
    in_features,
    stride,
    GROUP: tl.constexpr,
    OF_BY: tl.constexpr,
    CODE: tl.constexpr,
    HALVES: tl.constexpr,
    BYTES: tl.constexpr,
    OUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    stride = stride.to(tl.int64)
    outs, step = tl.program_id(1) * OUT + tl.arange(0, OUT), tl.program_id(0)
    real, columns = outs < num_columns, outs
    if chosen_ptr is not None:
        columns = tl.load(chosen_ptr + outs, mask=real, other=0)
        real &= (columns >= 0) & (columns < stride)
    at_bytes = tl.arange(0, BYTES)
    value_ptrs = values_ptr + (step * stride + columns)[:, None] * BYTES + at_bytes[None, :]
    values = tl.load(value_ptrs, mask=real[:, None], other=0)
    for half in tl.static_range(HALVES):
        begin = (step * HALVES + half) * BYTES
        known = real & (0 * columns + begin < in_features)
        part = values if HALVES == 1 else (values >> (4 * half)) & 15
        weight = _unpacked(
            part, numbers_ptr, by_ptr, minima_ptr, minima_by_ptr, zeros_ptr, offset, begin // GROUP, columns,
            known, stride, CODE, OF_BY,
        )  # fmt: skip
        at = begin + at_bytes
        out_ptrs = out_ptr + outs.to(tl.int64)[:, None] * in_features + at[None, :]
        tl.store(out_ptrs, weight.to(out_ptr.dtype.element_ty), mask=real[:, None] & (at < in_features)[None, :])


def packed_product(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, out: Tensor, add: bool) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.packed.matrix.packed_product`.

    `rows`, [at most FEW_ROWS, inputs], must be contiguous.
    """
    tiles = triton.cdiv(matrix.columns, _tile(matrix.columns))
    splits = _num_splits(rows.device, tiles, len(matrix.values))
    height = max(triton.next_power_of_2(len(rows)), LEAST_TILE)
    _launch(rows, matrix, bias, out, matrix.columns, height, splits=splits, add=add)
    return out


def experts_product(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, out: Tensor, routes: Routes) -> None:
    """Launches the kernel for `wingbeat.kernels.packed.experts.experts_product`; rows are contiguous."""
    columns = matrix.columns // routes.num_experts
    _launch(rows, matrix, bias, out, columns, routes.height, routes=routes)


def _launch(
    rows: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None,
    out: Tensor,
    columns: int,
    height: int,
    splits: int = 1,
    add: bool = False,
    routes: Routes | None = None,
) -> None:
    """Launches products with the first `columns` columns, or, given `routes`, with the columns of each row's expert."""
    if not len(out):
        return
    tile, blocks = _tile(columns), 1 if routes is None else routes.blocks.shape[1]
    sums = rows.new_empty(splits, columns, height, dtype=torch.float32) if splits > 1 else None
    with torch.cuda.device_of(rows):
        _packed_product_kernel[(triton.cdiv(columns, tile), splits, blocks)](
            rows,
            *_tensors(matrix),
            bias,
            sums,
            matrix.counters,
            None if routes is None else routes.order,
            None if routes is None else routes.blocks,
            out,
            matrix.offset,
            len(out),
            matrix.inputs,
            columns,
            len(matrix.values),
            _stride(matrix),
            out.stride(0),
            **_constants(matrix),
            CHOICES=len(out) // len(rows),
            ROWS=height,
            OUT=tile,
            SPLITS=splits,
            ADD=add,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
            **options(fused=True),
        )


def unpack(matrix: PackedMatrix, dtype: torch.dtype, columns: Tensor | None = None) -> Tensor:
    """Launches the kernel for `wingbeat.kernels.packed.matrix.unpack`."""
    count = matrix.columns if columns is None else len(columns)
    out = matrix.values.new_empty(count, matrix.inputs, dtype=dtype)
    if count:
        grid = (len(matrix.values), triton.cdiv(count, _UNPACK_TILE))
        with torch.cuda.device_of(out):
            _unpack_kernel[grid](
                *_tensors(matrix),
                columns,
                out,
                matrix.offset,
                count,
                matrix.inputs,
                _stride(matrix),
                **_constants(matrix),
                OUT=_UNPACK_TILE,
                num_warps=4,
                **options(fused=True),
            )
    return out


def _tile(columns: int) -> int:
    """Columns of a program's tile."""
    return min(_OUT_TILE, max(triton.next_power_of_2(columns), LEAST_TILE))


def _num_splits(device: torch.device, tiles: int, num_steps: int) -> int:
    """Number of programs that share a tile, such that every multiprocessor has work and every program has steps."""
    limits = device_limits(device.index or 0) if device.type == "cuda" else KNOWN["H100"]
    wanted = limits.num_sms * _PROGRAMS_OF_SM // tiles
    splits = max(min(wanted, num_steps // _LEAST_STEPS), 1)
    return triton.cdiv(num_steps, triton.cdiv(num_steps, splits))


def _tensors(matrix: PackedMatrix) -> tuple[Tensor | None, ...]:
    minima = matrix.minima or (None, None)
    return matrix.values, *matrix.scales, *minima, matrix.zeros


def _stride(matrix: PackedMatrix) -> int:
    """Number of columns of the underlying memory, of which the matrix may be a slice."""
    return matrix.values.stride(0) // matrix.values.shape[2]


def _constants(matrix: PackedMatrix) -> dict[str, Any]:
    by = matrix.scales.factors
    return {
        "GROUP": matrix.group,
        "OF_BY": 1 if by is None else len(matrix.scales.numbers) // len(by),
        "CODE": _CODES.get(matrix.form.name, _WHOLE).value,
        "HALVES": matrix.halves,
        "BYTES": matrix.values.shape[2],
    }
