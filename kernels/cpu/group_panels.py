"""Weights of few bits in groups of inputs, packed for the C++."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.cpu.structs import Matrix
from wingbeat.kernels.layer.grouped_weight import GroupedWeight

GROUPED_BYTES, GROUPED_NIBBLES = 6, 7


class GroupPanels(NamedTuple):
    """A `GroupedWeight`, packed; the same attributes as `panels.Panels`."""

    storage: Tensor
    """int8 [num_panels, inputs, width]; of four bits uint8 [num_panels, inputs / 2, width], the later input of two in
    the upper half"""
    parts: tuple[int, ...]
    inputs: int
    dtype: torch.dtype
    bias: Tensor | None
    scales: Tensor
    """float16 [num_panels, inputs / GROUP, width]; where there are minima, these behind them [2, ...]."""
    offset: float
    matrices: ctypes.Array

    @classmethod
    def pack(
        cls,
        weight: GroupedWeight,
        width: int,
        dtype: torch.dtype = torch.float32,
        bias: Tensor | None = None,
    ) -> "GroupPanels":
        """A copy of a weight on the CPU.

        Args:
            width: columns of a panel, as the library has it.
            dtype: of the numbers that the weight stands for.
            bias: float32 [columns].
        """
        columns, inputs = weight.values.shape
        is_whole = weight.values.dtype == torch.int8
        storage = _panels(weight.values, width)
        if not is_whole:
            storage = storage[:, ::2] | storage[:, 1::2] << 4
        given = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
        scales = torch.stack([_panels(one, width) for one in given])
        addresses = [one.data_ptr() for one in scales] + [None] * (2 - len(scales))
        kind, size = GROUPED_BYTES if is_whole else GROUPED_NIBBLES, storage[0].numel()
        bias_address = None if bias is None else bias.data_ptr()
        matrix = Matrix(storage.data_ptr(), bias_address, columns, width, size, kind, None, *addresses, weight.offset)
        return cls(storage, (columns,), inputs, dtype, bias, scales, weight.offset, (Matrix * 1)(matrix))

    def dense(self) -> Tensor:
        """A copy of the weight [columns, inputs], row by row."""
        storage = self.storage
        if storage.dtype == torch.uint8:
            storage = torch.stack([storage & 15, storage >> 4], dim=2).flatten(1, 2)
        values, scales, *minima = (_columns(one, self.parts[0]) for one in (storage, *self.scales))
        return GroupedWeight(values, scales, minima[0] if minima else None, self.offset).dense().to(self.dtype)


def _panels(rows: Tensor, width: int) -> Tensor:
    """[columns, n] -> [num_panels, n, width], contiguous, with zeros for columns that are not there."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % width))
    return padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous()


def _columns(panels: Tensor, columns: int) -> Tensor:
    """The inverse."""
    return panels.transpose(1, 2).flatten(0, 1)[:columns]
