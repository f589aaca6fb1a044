"""Rounds plain weights to the form in which a matrix is packed, in the memory of the old weights."""

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import E4M3, INT8, UINT4, GroupedWeight, Scales
from wingbeat.kernels.packed.matrix import PackedMatrix, to_step_layout

_LARGEST = {INT8: 127.0, E4M3: 448.0, UINT4: 7.0}
"""Number to which the largest magnitude of a group is mapped, if groups have no zero points."""
_CODES = {INT8: (-128, 127), UINT4: (0, 15)}
"""Range of stored integers, if groups have zero points."""


def why_not_rounded(matrix: PackedMatrix) -> str | None:
    """Reason why plain weights cannot be rounded to a matrix's form; None if they can."""
    if matrix.form not in _LARGEST:
        return f"nothing rounds to {matrix.form.name}"
    if matrix.minima is not None or matrix.scales.factors is not None:
        return f"{matrix.form.name} has minima, or scales of scales, as GGUF's K-quants have"
    if matrix.zeros is None and matrix.offset != (-8.0 if matrix.form is UINT4 else 0.0):
        return f"{matrix.form.name} has the offset {matrix.offset:g}"
    if not matrix.scales.numbers.is_floating_point():
        return f"{matrix.form.name} has scales that are integers"
    return None


def write_rounded(matrix: PackedMatrix, weight: Tensor) -> None:
    """Rounds a weight [columns, inputs], group by group, and writes it into a matrix's memory.

    Each group's largest magnitude, or its range, is mapped to that of the stored numbers; codes are rounded to nearest.
    """
    wide = weight.float()
    wide = (wide if matrix.order is None else wide[:, matrix.order]).unflatten(1, (-1, matrix.group))
    zeros = None if matrix.zeros is None else _with_zeros(matrix, wide)
    if zeros is None:
        scales = (wide.abs().amax(2) / _LARGEST[matrix.form]).to(matrix.scales.numbers.dtype)
        codes = wide / _divisor(scales)
    else:
        scales, codes, zeros = zeros
    made = to_step_layout(
        GroupedWeight(matrix.form, _bytes_of(matrix, codes), Scales(scales), None, zeros, matrix.offset, matrix.order)
    )
    new: list[Tensor] = []
    made.with_each(lambda part: new.append(part) or part)
    parts = iter(new)
    matrix.with_each(lambda part: part.copy_(next(parts)))


def _with_zeros(matrix: PackedMatrix, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and zero points [columns, groups], and unrounded codes [columns, groups, group]."""
    least, most = _CODES[matrix.form]
    low, high = wide.amin(2).clamp(max=0), wide.amax(2).clamp(min=0)
    scales = ((high - low) / (most - least)).to(matrix.scales.numbers.dtype)
    zeros = (least - low / _divisor(scales)[:, :, 0]).round().clamp(least, most)
    return scales, wide / _divisor(scales) + zeros[:, :, None], zeros.to(matrix.zeros.dtype)


def _divisor(scales: Tensor) -> Tensor:
    """Stored scales [columns, groups] as float32 divisors [columns, groups, 1], infinite where a scale is 0."""
    wide = scales.float()
    return wide.masked_fill(wide == 0, torch.inf)[:, :, None]


def _bytes_of(matrix: PackedMatrix, codes: Tensor) -> Tensor:
    """Codes [columns, groups, group] as the bytes of `GroupedWeight.values`."""
    flat = codes.flatten(1)
    if matrix.form is E4M3:
        return flat.clamp_(-_LARGEST[E4M3], _LARGEST[E4M3]).to(torch.float8_e4m3fn).view(torch.uint8)
    if matrix.zeros is not None:
        least, most = _CODES[matrix.form]
        whole = flat.round_().clamp_(least, most)
    else:
        whole = flat.round_().clamp_(-_LARGEST[matrix.form], _LARGEST[matrix.form]).sub_(matrix.offset)
    return whole.byte() if matrix.form is UINT4 else whole.to(torch.int8).view(torch.uint8)
