"""Products by weights of eight bits on a GPU: few rows, so that the time is that of reading the weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a tile: at least what the tensor cores take."""
_OUT_TILE = 32
_IN_TILE = 128


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_linear_kernel(
    inputs_ptr,  # [num_rows, in_features]
    values_ptr,  # float8 [out_features, in_features]
    scales_ptr,  # float32 [out_features]
    bias_ptr,  # [out_features], or None
    out_ptr,  # [num_rows, out_features]
    num_rows,
    in_features,
    out_features,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUT + tl.arange(0, OUT)
    live, real = rows < num_rows, outs < out_features
    row_ptrs = inputs_ptr + rows.to(tl.int64)[:, None] * in_features
    out_ptrs = values_ptr + outs.to(tl.int64)[:, None] * in_features
    acc = tl.zeros([ROWS, OUT], tl.float32)
    for begin in tl.range(0, in_features, IN):
        at = begin + tl.arange(0, IN)
        inside = (at < in_features)[None, :]
        inputs = tl.load(row_ptrs + at[None, :], mask=live[:, None] & inside, other=0.0)
        values = tl.load(out_ptrs + at[None, :], mask=real[:, None] & inside, other=0.0)
        acc = tl.dot(inputs, tl.trans(values.to(inputs.dtype)), acc, input_precision=PRECISION)
    acc = acc * tl.load(scales_ptr + outs, mask=real, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outs, mask=real, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + rows.to(tl.int64)[:, None] * out_features + outs[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & real[None, :])


def fp8_linear(inputs: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `wingbeat.kernels.layer.fp8.fp8_linear`; the weight is values * scales[:, None]."""
    out_features, in_features = values.shape
    rows = inputs.reshape(-1, in_features).contiguous()
    num_rows = len(rows)
    out = rows.new_empty(num_rows, out_features)
    if num_rows:
        tile = min(max(triton.next_power_of_2(num_rows), _LEAST_ROWS), _MOST_ROWS)
        with torch.cuda.device_of(rows):
            _fp8_linear_kernel[(triton.cdiv(out_features, _OUT_TILE), triton.cdiv(num_rows, tile))](
                rows,
                values,
                scales,
                bias,
                out,
                num_rows,
                in_features,
                out_features,
                ROWS=tile,
                OUT=_OUT_TILE,
                IN=_IN_TILE,
                PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
                num_warps=4,
                num_stages=3,
            )
    return out.view(*inputs.shape[:-1], out_features)
