"""Weights of four or eight bits as a GPU reads them, and products by them; the torch reference.

A program of a kernel reads a tile of a step: some bytes of each of its columns, which lie side by side. A byte holds
the number of one input of the step, or those of two: its lower half is an input of the step's first half.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.grouped_weight import E2M1, UINT4, Form, GroupedWeight, Scales

FEW_ROWS = 64
"""Rows of a product up to which weights are unpacked in registers; above, into memory for the device's own product."""
STEP_BYTES = (64, 32, 16)
"""Bytes of a column in a step: the most of which a group is a multiple."""
LEAST_TILE = 16
"""Columns of a program, at least."""
_UNPACKED_AT_ONCE = 1 << 26
"""Numbers in memory."""


class PackedMatrix(NamedTuple):
    """A weight [columns, inputs] = number * scale + shift, as a `GroupedWeight` has it, laid out in steps."""

    form: Form
    values: Tensor
    """uint8 [steps, columns, bytes of a step]; inputs that no column has are zeros"""
    scales: Scales
    """Numbers [groups, columns], and [groups / n, columns]"""
    minima: Scales | None
    zeros: Tensor | None
    """[groups, columns]"""
    offset: float
    order: Tensor | None
    inputs: int
    group: int
    """Inputs of a group."""
    counters: Tensor
    """int32 [tiles], zeros between products: programs that are done with a tile."""
    alike: bool = False
    """Whether a row's product has the same bits in any batch: many rows are then several products of few."""

    @property
    def columns(self) -> int:
        """Outputs of the product."""
        return self.values.shape[1]

    @property
    def halves(self) -> int:
        """Numbers in a byte."""
        return _halves(self.form)

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedMatrix":
        return self  # frozen: copies of a model share it

    def nbytes(self) -> int:
        """Memory that it takes."""
        sizes: list[int] = []
        self.with_each(lambda part: sizes.append(part.nbytes) or part)
        return sum(sizes)

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "PackedMatrix":
        """Another with each tensor [.., columns, ..] changed; counters are the same."""
        return self._replace(
            values=change(self.values),
            scales=_scaled(self.scales, change),
            minima=None if self.minima is None else _scaled(self.minima, change),
            zeros=None if self.zeros is None else change(self.zeros),
        )

    def to(self, device: torch.device) -> "PackedMatrix":
        """A copy on a device; itself where it is there."""
        if self.values.device == device:
            return self
        order = None if self.order is None else self.order.to(device)
        moved = self.with_each(lambda part: part.to(device))
        return moved._replace(order=order, counters=self.counters.to(device))

    def of(self, columns: slice | Tensor) -> "PackedMatrix":
        """Some of its columns; those of a slice in its memory."""
        return self.with_each(lambda part: part[:, columns])

    def dense(self) -> Tensor:
        """The weight itself, in float32."""
        return self._grouped(self.order).dense()

    def _grouped(self, order: Tensor | None) -> GroupedWeight:
        """The weight as files have it."""
        values = self.values if self.halves == 1 else torch.cat([self.values & 15, self.values >> 4], dim=2)
        values = values.transpose(0, 1).flatten(1)[:, : self.inputs]
        minima = None if self.minima is None else _scaled(self.minima, Tensor.t)
        zeros = None if self.zeros is None else self.zeros.t()
        return GroupedWeight(self.form, values, _scaled(self.scales, Tensor.t), minima, zeros, self.offset, order)


def can_lay(weight: GroupedWeight) -> bool:
    """Whether each byte of a step is in one group."""
    return weight.group % STEP_BYTES[-1] == 0 and weight.values.numel() > 0


def lay(weight: GroupedWeight) -> PackedMatrix:
    """A weight in steps, on its device."""
    inputs, halves = weight.values.shape[1], _halves(weight.form)
    size = next(size for size in STEP_BYTES if weight.group % size == 0)
    values = functional.pad(weight.values, (0, -inputs % (size * halves))).unflatten(1, (-1, halves, size))
    values = values[:, :, 0] if halves == 1 else values[:, :, 0] | values[:, :, 1] << 4

    def turned(part: Tensor) -> Tensor:
        # A copy has the strides of its shape, where `contiguous` leaves those of a dimension of one.
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
    """Matrices of the same inputs as one; None where they lie otherwise than each other."""
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
    """Properties that matrices side by side have in common; an order of inputs is a matrix's own."""
    tensors: list[object] = []
    matrix.with_each(lambda part: tensors.append((part.dtype, len(part))) or part)
    own = None if matrix.order is None else id(matrix.order)
    return (matrix.form.name, matrix.offset, matrix.inputs, matrix.group, matrix.minima is None, own, *tensors)


def packed_product(
    inputs: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """inputs @ weight.T + bias, summed in float32; the weight's numbers are rounded to the inputs' dtype.

    Args:
        inputs: [num_rows, inputs], float32, bfloat16 or float16.
        bias: [columns].
        out: [num_rows, columns], where the product goes; its rows may lie apart from each other.
        add: to what `out` holds.

    Returns:
        [num_rows, columns], of the inputs' dtype unless `out` is given.
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
        weight, part = unpack(matrix.of(columns), rows.dtype).t(), out[:, columns]
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
    """Columns of the weight as numbers [num_columns, inputs], the inputs in the order in which they lie.

    Args:
        columns: int64 [num_columns]; None takes all.
    """
    if kernels := choice.compiled("packed_product", matrix.values):
        return kernels.unpack(matrix, dtype, columns)
    chosen = matrix if columns is None else matrix.of(columns)
    return chosen._grouped(None).dense().to(dtype)


def _wide_product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A product [num_rows, columns] that leaves in a wider dtype."""
    if rows.is_cuda:
        return torch.mm(rows, weight, out_dtype=dtype)
    return rows.to(dtype) @ weight.to(dtype)


def _counters(values: Tensor, columns: int) -> Tensor:
    return values.new_zeros(-(-columns // LEAST_TILE), dtype=torch.int32)


def _halves(form: Form) -> int:
    return 2 if form in (UINT4, E2M1) else 1


def _scaled(scales: Scales, change: Callable[[Tensor], Tensor]) -> Scales:
    return Scales(change(scales.numbers), None if scales.by is None else change(scales.by))
