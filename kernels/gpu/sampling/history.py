"""Counts the tokens of histories on a GPU; a program handles a tile of a row. Reference: `history.count_tokens`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.sampling.processors import Histories

_TILE = 512


@triton.jit(
    # Callers pass different strides and views, but no variant is compiled for each of them: only the number of steps
    # selects a variant, and these variants are compiled at startup.
    do_not_specialize=["token_stride", "prompt_stride", "width", "num_columns"],
    do_not_specialize_on_alignment=["token_ids", "lens", "num_prompt_tokens", "slots", "in_prompt", "in_output"],
)
def _count_kernel(
    token_ids,
    token_stride,
    lens,
    num_prompt_tokens,
    prompt_stride,
    slots,
    sorted_ids,
    columns,
    in_prompt,
    in_output,
    width,
    num_columns,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds each token by binary search among the ids that have columns, and counts it."""
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    length = tl.minimum(tl.load(lens + slot), width)
    steps = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = steps < length
    tokens = tl.load(token_ids + slot * token_stride + steps, mask=there, other=-1)
    low = tl.zeros([TILE], dtype=tl.int32)
    high = tl.zeros([TILE], dtype=tl.int32) + num_columns
    for _ in range(STEPS):
        is_open = low < high
        middle = (low + high) // 2
        below = tl.load(sorted_ids + middle, mask=is_open, other=0) < tokens
        low = tl.where(is_open & below, middle + 1, low)
        high = tl.where(is_open & (below == 0), middle, high)
    inside = there & (low < num_columns)
    found = inside & (tl.load(sorted_ids + low, mask=inside, other=-1) == tokens)
    at = row * num_columns + tl.load(columns + low, mask=found, other=0)
    is_output = steps >= tl.load(num_prompt_tokens + slot * prompt_stride)
    ones = tl.full([TILE], 1, dtype=tl.int32)
    tl.store(in_prompt + at, ones.to(tl.uint8), mask=found & (is_output == 0))
    tl.atomic_add(in_output + at, ones, mask=found & is_output)


def count_tokens(
    histories: Histories, sorted_ids: Tensor, columns: Tensor, in_prompt: Tensor, in_output: Tensor
) -> None:
    """Launches the kernels for `history.count_tokens`: three launches."""
    token_ids, lens, num_prompt_tokens, slots = histories
    num_rows, width, num_columns = len(slots), token_ids.shape[1], len(sorted_ids)
    in_prompt.zero_()
    in_output.zero_()
    if num_rows == 0 or width == 0:
        return
    with torch.cuda.device_of(in_output):
        _count_kernel[(num_rows, triton.cdiv(width, _TILE))](
            token_ids,
            token_ids.stride(0),
            lens.contiguous(),
            num_prompt_tokens,
            num_prompt_tokens.stride(0),
            slots.contiguous(),
            sorted_ids,
            columns,
            in_prompt.view(torch.uint8),
            in_output,
            width,
            num_columns,
            STEPS=num_columns.bit_length(),
            TILE=_TILE,
            **options(fused=False),
        )
