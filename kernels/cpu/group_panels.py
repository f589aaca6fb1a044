"""Packs group-quantized weights of few bits for the C++ (`groups.h`)."""

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
"""Dtypes of scales -> their C++ enumeration values."""


class GroupPanels(NamedTuple):
    """A packed `GroupedWeight`, with the attributes of `panels.Panels`."""

    storage: Tensor
    """uint8 [num_panels, units, rows * width], see `group_forms`."""
    parts: tuple[int, ...]
    """As `Panels.parts`."""
    inputs: int
    dtype: torch.dtype
    """Dtype of the dequantized weight."""
    bias: Tensor | None
    order: Tensor | None
    """Input order, as `GroupedWeight.order`."""
    is_whole: bool
    """Whether the stored numbers are integers, so that rows may be rounded to int8 (`round_rows`)."""
    of_groups: tuple[Tensor, ...]
    """Scales, minima and zero points by panel, [num_panels, num_groups, width] each; held here because the C++ has
    pointers to them."""
    matrices: ctypes.Array
    read: Callable[..., bool]
    """The library function `wingbeat_columns`."""

    @classmethod
    def of(
        cls,
        weight: GroupedWeight,
        storage: Tensor,
        bias: Tensor | None,
        read: Callable[..., bool],
        parts: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "GroupPanels":
        """Builds the panels' description from packed storage.

        Args:
            storage, read, dtype: as the fields of the same name.
            bias: float32 [columns], or None.
            parts: numbers of columns of adjacent parts, all but the last a multiple of the panels' columns; None is a
                single part.
        """
        columns, inputs = weight.values.shape
        layout = LAYOUTS[weight.form]
        width, held = storage.shape[2] // layout.rows, []

        def by_panel(scales: Scales | None) -> tuple[Tensor | None, ...]:
            found = [None if one is None else _panels(one, width) for one in scales or (None, None)]
            held.extend(one for one in found if one is not None)
            return tuple(found)

        def from_panel(panel: int, numbers: Tensor | None, by: Tensor | None) -> structs.Scales:
            if numbers is None:
                return structs.Scales()
            each = 1 if by is None else numbers.shape[1] // by.shape[1]
            address = None if by is None else by[panel:].data_ptr()
            return structs.Scales(numbers[panel:].data_ptr(), address, SCALE_KINDS[numbers.dtype], each)

        are_zeros, found, column = weight.zeros is not None, [], 0
        scales, shifts = by_panel(weight.scales), by_panel(Scales(weight.zeros) if are_zeros else weight.minima)
        for part in parts or (columns,):
            panel = column // width
            own = (from_panel(panel, *scales), from_panel(panel, *shifts))
            groups = structs.Groups(*own, weight.group, weight.offset, are_zeros, False)
            address, size = None if bias is None else bias[column:].data_ptr(), storage[0].numel()
            found.append(Matrix(storage[panel:].data_ptr(), address, part, width, size, layout.kind, None, groups))
            column += part
        matrices = (Matrix * len(found))(*found)
        is_whole, order = weight.form is not E4M3, weight.order
        parts = parts or (columns,)
        return cls(storage, parts, inputs, dtype, bias, order, is_whole, tuple(held), matrices, read)

    def round_rows(self) -> bool:
        """Makes matrix products round their input rows to int8 first, in blocks of 32 inputs (`digits.h`).

        Returns False, having changed nothing, if the stored numbers are not integers.
        """
        for matrix in self.matrices:
            matrix.groups.rounded = self.is_whole
        return self.is_whole

    def nbytes(self) -> int:
        """Bytes of the stored numbers and scales, without the bias."""
        return self.storage.nbytes + sum(one.nbytes for one in self.of_groups)

    def dense(self) -> Tensor:
        """Dequantizes the weight to [columns, inputs]."""
        return self.columns_at(torch.arange(sum(self.parts), device="cpu")).to(self.dtype)

    def columns_at(self, columns: Tensor) -> Tensor:
        """Dequantizes some columns, given as int64 [n], to [n, inputs].

        Raises:
            IndexError: a column does not exist.
        """
        columns = columns.long().contiguous()
        found = torch.empty(len(columns), self.inputs, dtype=torch.float32, device="cpu")
        whole, total = Matrix.from_buffer_copy(self.matrices[0]), sum(self.parts)
        whole.columns = total
        if not self.read(ctypes.byref(whole), self.inputs, columns.data_ptr(), len(columns), found.data_ptr()):
            wrong = columns[(columns < 0) | (columns >= total)]
            raise IndexError(f"column {int(wrong[0])} of {total}")
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)


def can_pack(weight: GroupedWeight) -> bool:
    """Whether a weight can be packed: its group size must be a multiple of 8, and so of every layout's unit and of a
    rounded row's step.
    """
    return weight.group % 8 == 0


def _panels(rows: Tensor, width: int) -> Tensor:
    """Transposes [columns, n] to contiguous [num_panels, n, width], padding missing columns with zeros."""
    padded = rows if len(rows) % width == 0 else torch.cat([rows, rows.new_zeros(-len(rows) % width, rows.shape[1])])
    return padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
