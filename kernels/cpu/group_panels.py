"""Weights of few bits in groups of inputs, packed for the C++ (`groups.h`)."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.cpu import structs
from wingbeat.kernels.cpu.group_forms import LAYOUTS
from wingbeat.kernels.cpu.structs import KINDS, Matrix
from wingbeat.kernels.grouped_weight import E4M3, GroupedWeight, Scales

SCALE_KINDS = {**KINDS, torch.uint8: 3, torch.int8: 4}
"""Types of the numbers of scales, as the C++ names them."""


class GroupPanels(NamedTuple):
    """A `GroupedWeight`, packed; the same attributes as `panels.Panels`."""

    storage: Tensor
    """uint8 [num_panels, units, rows * width], see `group_forms`"""
    parts: tuple[int, ...]
    inputs: int
    dtype: torch.dtype
    """Of the numbers that the weight stands for."""
    bias: Tensor | None
    meant: GroupedWeight
    """The weight without `values`, and with numbers of groups by panel [num_panels, num_groups, width]."""
    matrices: ctypes.Array

    @classmethod
    def of(cls, weight: GroupedWeight, storage: Tensor, bias: Tensor | None) -> "GroupPanels":
        """A weight whose numbers lie in panels.

        Args:
            storage: as the field; `bias` likewise, float32 [columns].
        """
        columns, inputs = weight.values.shape
        layout = LAYOUTS[weight.form]
        width = storage.shape[2] // layout.rows
        scales = _packed(weight.scales, width)
        minima = None if weight.minima is None else _packed(weight.minima, width)
        zeros = None if weight.zeros is None else _panels(weight.zeros, width)
        shifts = minima if zeros is None else Scales(zeros)
        groups = structs.Groups(_struct(scales), _struct(shifts), weight.group, weight.offset, zeros is not None, False)
        address, size = None if bias is None else bias.data_ptr(), storage[0].numel()
        matrix = Matrix(storage.data_ptr(), address, columns, width, size, layout.kind, None, groups)
        meant = weight._replace(values=weight.values.new_empty(0, 0), scales=scales, minima=minima, zeros=zeros)
        return cls(storage, (columns,), inputs, torch.float32, bias, meant, (Matrix * 1)(matrix))

    @property
    def order(self) -> Tensor | None:
        """As of the weight."""
        return self.meant.order

    def round_rows(self) -> bool:
        """Round rows that are multiplied by it to int8 first, in blocks of 32 inputs, as `rounded.h` has it; whether it
        can: its numbers must be whole."""
        is_whole = self.meant.form is not E4M3
        for matrix in self.matrices:
            matrix.groups.rounded = is_whole
        return is_whole

    def nbytes(self) -> int:
        """Bytes of all that is held, but for the bias."""
        scales = (self.meant.scales, self.meant.minima or (), (self.meant.zeros,))
        return self.storage.nbytes + sum(one.nbytes for pair in scales for one in pair if one is not None)

    def dense(self) -> Tensor:
        """A copy of the weight [columns, inputs], row by row."""
        columns = self.parts[0]
        return self._weight(lambda panels: panels.transpose(1, 2).flatten(0, 1)[:columns])

    def columns_at(self, columns: Tensor) -> Tensor:
        """Some columns [n] of the weight: [n, inputs]."""
        width = self._width
        panel, within = columns // width, columns % width
        return self._weight(lambda panels: panels[panel, :, within])

    @property
    def _width(self) -> int:
        """Columns of a panel."""
        return self.storage.shape[2] // LAYOUTS[self.meant.form].rows

    def _weight(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight of those columns that `read` takes of panels [num_panels, n, width, ..] -> [columns, n, ..]."""
        meant, layout, values = self.meant, LAYOUTS[self.meant.form], []
        begin, width = 0, self._width
        for size in layout.fields:
            field = self.storage[:, :, begin : begin + size * width].unflatten(2, (width, size))
            values.append(read(field))
            begin += size * width
        values = layout.unpack(torch.cat(values, dim=2)).flatten(1)
        scales, minima = (
            None if one is None else Scales(*(None if part is None else read(part) for part in one))
            for one in (meant.scales, meant.minima)
        )
        zeros = None if meant.zeros is None else read(meant.zeros)
        return meant._replace(values=values, scales=scales, minima=minima, zeros=zeros).dense().to(self.dtype)


def can_pack(weight: GroupedWeight) -> bool:
    """Whether its groups are whole units of any layout, and steps of rounded rows."""
    return weight.group % 8 == 0


def _packed(scales: Scales, width: int) -> Scales:
    return Scales(*(None if one is None else _panels(one, width) for one in scales))


def _struct(scales: Scales | None) -> structs.Scales:
    if scales is None:
        return structs.Scales()
    numbers, by = scales
    each = 1 if by is None else numbers.shape[1] // by.shape[1]
    return structs.Scales(numbers.data_ptr(), None if by is None else by.data_ptr(), SCALE_KINDS[numbers.dtype], each)


def _panels(rows: Tensor, width: int) -> Tensor:
    """[columns, n] -> [num_panels, n, width], contiguous, with zeros for columns that are not there."""
    padded = rows if len(rows) % width == 0 else torch.cat([rows, rows.new_zeros(-len(rows) % width, rows.shape[1])])
    return padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
