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
    order: Tensor | None
    """As of the weight."""
    is_whole: bool
    """Whether its numbers are whole, so that rows may be rounded (`round_rows`)."""
    of_groups: tuple[Tensor, ...]
    """Scales, minima and zero points by panel [num_panels, num_groups, width]."""
    matrices: ctypes.Array
    read: Callable[..., bool]
    """The library's `wingbeat_columns`."""

    @classmethod
    def of(
        cls, weight: GroupedWeight, storage: Tensor, bias: Tensor | None, read: Callable[..., bool]
    ) -> "GroupPanels":
        """A weight whose numbers lie in panels.

        Args:
            storage, read: as the fields; `bias` likewise, float32 [columns].
        """
        columns, inputs = weight.values.shape
        layout = LAYOUTS[weight.form]
        width, held = storage.shape[2] // layout.rows, []

        def by_panel(scales: Scales | None) -> structs.Scales:
            if scales is None:
                return structs.Scales()
            numbers, by = (None if one is None else _panels(one, width) for one in scales)
            held.extend(one for one in (numbers, by) if one is not None)
            each = 1 if by is None else numbers.shape[1] // by.shape[1]
            address = None if by is None else by.data_ptr()
            return structs.Scales(numbers.data_ptr(), address, SCALE_KINDS[numbers.dtype], each)

        are_zeros = weight.zeros is not None
        scales, shifts = by_panel(weight.scales), by_panel(Scales(weight.zeros) if are_zeros else weight.minima)
        groups = structs.Groups(scales, shifts, weight.group, weight.offset, are_zeros, False)
        address, size = None if bias is None else bias.data_ptr(), storage[0].numel()
        matrices = (Matrix * 1)(Matrix(storage.data_ptr(), address, columns, width, size, layout.kind, None, groups))
        is_whole, order = weight.form is not E4M3, weight.order
        return cls(storage, (columns,), inputs, torch.float32, bias, order, is_whole, tuple(held), matrices, read)

    def round_rows(self) -> bool:
        """Round rows that are multiplied by it to int8 first, in blocks of 32 inputs, as `rounded.h` has it; whether it
        can."""
        for matrix in self.matrices:
            matrix.groups.rounded = self.is_whole
        return self.is_whole

    def nbytes(self) -> int:
        """Bytes of all that is held, but for the bias."""
        return self.storage.nbytes + sum(one.nbytes for one in self.of_groups)

    def dense(self) -> Tensor:
        """A copy of the weight [columns, inputs], row by row."""
        return self.columns_at(torch.arange(self.parts[0], device="cpu"))

    def columns_at(self, columns: Tensor) -> Tensor:
        """Some columns, int64 [n], of the weight: [n, inputs].

        Raises:
            IndexError: one is not there.
        """
        columns = columns.long().contiguous()
        found = torch.empty(len(columns), self.inputs, dtype=torch.float32, device="cpu")
        if not self.read(self.matrices, self.inputs, columns.data_ptr(), len(columns), found.data_ptr()):
            wrong = columns[(columns < 0) | (columns >= self.parts[0])]
            raise IndexError(f"column {int(wrong[0])} of {self.parts[0]}")
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)


def can_pack(weight: GroupedWeight) -> bool:
    """Whether its groups are whole units of any layout, and steps of rounded rows."""
    return weight.group % 8 == 0


def _panels(rows: Tensor, width: int) -> Tensor:
    """[columns, n] -> [num_panels, n, width], contiguous, with zeros for columns that are not there."""
    padded = rows if len(rows) % width == 0 else torch.cat([rows, rows.new_zeros(-len(rows) % width, rows.shape[1])])
    return padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
