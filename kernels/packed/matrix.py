"""Packed 4-bit and 8-bit weights for GPUs, and matrix products with them: torch reference.

The inputs are divided into steps. A step stores some consecutive bytes of each column, column by column, and a program
of the kernel reads a tile of the step's columns at a time. A byte holds the number of one input, or of two inputs of
the same step: the lower four bits belong to an input in the step's first half, the upper four to an input in its second
half.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.grouped_weight import E2M1, UINT4, Form, GroupedWeight, Scales

FEW_ROWS = 64
"""Maximum number of rows of a product that unpacks weights in registers. For more rows, weights are unpacked into
memory, and torch computes the matrix product."""
STEP_BYTES = (64, 32, 16)
"""Possible numbers of bytes that a step stores per column; the largest number that divides the group size is used."""
LEAST_TILE = 16
"""Minimum number of columns of a program."""
_UNPACKED_AT_ONCE = 1 << 26
"""Maximum number of weight elements that are unpacked into memory at once."""


class PackedMatrix(NamedTuple):
    """Group-quantized weight [columns, inputs] = number * scale + shift, as `GroupedWeight`, in the step layout."""

    form: Form
    values: Tensor
    """uint8 [steps, columns, bytes of a step]; padding inputs are zero."""
    scales: Scales
    """Scales [groups, columns], and their factors `by` [groups / n, columns]."""
    minima: Scales | None
    zeros: Tensor | None
    """Zero points [groups, columns], or None."""
    offset: float
    order: Tensor | None
    inputs: int
    group: int
    """Inputs per group."""
    counters: Tensor
    """int32 [tiles]: number of programs that have finished each tile; all zero when no product runs."""
    alike: bool = False
    """Whether the bits of a product's rows are independent of the batch. If so, a product of many rows runs as several
    products of few rows."""

    @property
    def columns(self) -> int:
        """Number of output columns."""
        return self.values.shape[1]

    @property
    def halves(self) -> int:
        """Numbers per byte: 1 or 2."""
        return _halves(self.form)

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedMatrix":
        return self  # immutable, so copies of a model share it

    def nbytes(self) -> int:
        """Bytes of the stored tensors, without counters."""
        sizes: list[int] = []
        self.with_each(lambda part: sizes.append(part.nbytes) or part)
        return sum(sizes)

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "PackedMatrix":
        """Returns a copy with `change` applied to each tensor [.., columns, ..]; counters are shared."""
        return self._replace(
            values=change(self.values),
            scales=_scaled(self.scales, change),
            minima=None if self.minima is None else _scaled(self.minima, change),
            zeros=None if self.zeros is None else change(self.zeros),
        )

    def to(self, device: torch.device) -> "PackedMatrix":
        """Copies the matrix to a device; returns self if it is there already."""
        if self.values.device == device:
            return self
        order = None if self.order is None else self.order.to(device)
        moved = self.with_each(lambda part: part.to(device))
        return moved._replace(order=order, counters=self.counters.to(device))

    def select_columns(self, columns: slice | Tensor) -> "PackedMatrix":
        """Returns some columns as a matrix; if `columns` is a slice, the result shares this matrix's memory."""
        return self.with_each(lambda part: part[:, columns])

    def dense(self) -> Tensor:
        """Dequantizes the weight to float32 [columns, inputs]."""
        return self._grouped(self.order).dense()

    def _grouped(self, order: Tensor | None) -> GroupedWeight:
        """Converts to the layout of `GroupedWeight`."""
        values = self.values if self.halves == 1 else torch.cat([self.values & 15, self.values >> 4], dim=2)
        values = values.transpose(0, 1).flatten(1)[:, : self.inputs]
        minima = None if self.minima is None else _scaled(self.minima, Tensor.t)
        zeros = None if self.zeros is None else self.zeros.t()
        return GroupedWeight(self.form, values, _scaled(self.scales, Tensor.t), minima, zeros, self.offset, order)


def fits_step_layout(weight: GroupedWeight) -> bool:
    """Whether a weight fits the step layout: each group must consist of whole steps of the smallest size."""
    return weight.group % STEP_BYTES[-1] == 0 and weight.values.numel() > 0


def to_step_layout(weight: GroupedWeight) -> PackedMatrix:
    """Converts a weight to the step layout, on the weight's device."""
    inputs, halves = weight.values.shape[1], _halves(weight.form)
    size = next(size for size in STEP_BYTES if weight.group % size == 0)
    values = functional.pad(weight.values, (0, -inputs % (size * halves))).unflatten(1, (-1, halves, size))
    values = values[:, :, 0] if halves == 1 else values[:, :, 0] | values[:, :, 1] << 4

    def turned(part: Tensor) -> Tensor:
        # The kernel relies on strides that follow from the shape. `clone` computes all strides from the shape, whereas
        # `contiguous` would keep the strides of dimensions of size 1.
        return part.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    return PackedMatrix(
        weight.form,
        turned(values),
        _scaled(weight.scales, turned),
        None if weight.minima is None else _scaled(weight.minima, turned),
        None if weight.zeros is None else turned(weight.zeros),
        weight.offset,
        weight.order,
        inputs,
        weight.group,
        _counters(values, len(values)),
    )


def side_by_side(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Concatenates the columns of matrices with the same inputs; None if their layouts differ."""
    if len({layout_of(one) for one in matrices}) > 1:
        return None
    parts: list[list[Tensor]] = []
    for one in matrices:
        parts.append([])
        one.with_each(lambda part: parts[-1].append(part) or part)
    joined = iter([torch.cat(same, dim=1) for same in zip(*parts, strict=True)])
    made = matrices[0].with_each(lambda part: next(joined))
    return made._replace(counters=_counters(made.values, made.columns))


def layout_of(matrix: PackedMatrix) -> tuple[object, ...]:
    """Properties that matrices must share to be concatenated, including the identity of their input order."""
    tensors: list[object] = []
    matrix.with_each(lambda part: tensors.append((part.dtype, len(part))) or part)
    own = None if matrix.order is None else id(matrix.order)
    return (matrix.form.name, matrix.offset, matrix.inputs, matrix.group, matrix.minima is None, own, *tensors)


def packed_product(
    inputs: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """Computes inputs @ weight.T + bias in float32; dequantized weights are rounded to the inputs' dtype.

    Args:
        inputs: [num_rows, inputs], float32, bfloat16 or float16.
        bias: [columns].
        out: [num_rows, columns] result buffer, with any row stride; None allocates a new one.
        add: adds the product to `out` instead of overwriting it.

    Returns:
        [num_rows, columns], in the inputs' dtype unless `out` is given.
    """
    rows = (inputs if matrix.order is None else inputs[:, matrix.order]).contiguous()
    if out is None:
        out = rows.new_empty(len(rows), matrix.columns)
    kernels = choice.compiled("packed_product", rows)
    if kernels is not None and (matrix.alike or len(rows) <= FEW_ROWS):
        for begin in range(0, len(rows), FEW_ROWS):
            some = slice(begin, begin + FEW_ROWS)
            kernels.packed_product(rows[some], matrix, bias, out[some], add)
        return out
    at_once = max(_UNPACKED_AT_ONCE // matrix.inputs // LEAST_TILE * LEAST_TILE, LEAST_TILE)
    for begin in range(0, matrix.columns, at_once):
        columns = slice(begin, begin + at_once)
        weight, part = unpack(matrix.select_columns(columns), rows.dtype).t(), out[:, columns]
        if add:
            part.addmm_(rows, weight)
        elif part.dtype == rows.dtype:
            torch.mm(rows, weight, out=part)
        else:
            part.copy_(_wide_product(rows, weight, part.dtype))
        if bias is not None:
            part += bias[columns]
    return out


def unpack(matrix: PackedMatrix, dtype: torch.dtype, columns: Tensor | None = None) -> Tensor:
    """Dequantizes columns to [num_columns, inputs], with inputs in their stored order.

    Args:
        columns: int64 [num_columns]; None selects all.
    """
    if kernels := choice.compiled("packed_product", matrix.values):
        return kernels.unpack(matrix, dtype, columns)
    chosen = matrix if columns is None else matrix.select_columns(columns)
    return chosen._grouped(None).dense().to(dtype)


def _wide_product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes a product [num_rows, columns] whose result has a wider dtype than its operands."""
    if rows.is_cuda:
        return torch.mm(rows, weight, out_dtype=dtype)
    return rows.to(dtype) @ weight.to(dtype)


def _counters(values: Tensor, columns: int) -> Tensor:
    return values.new_zeros(-(-columns // LEAST_TILE), dtype=torch.int32)


def _halves(form: Form) -> int:
    return 2 if form in (UINT4, E2M1) else 1


def _scaled(scales: Scales, change: Callable[[Tensor], Tensor]) -> Scales:
    return Scales(change(scales.numbers), None if scales.factors is None else change(scales.factors))
