"""Weights as the C++ reads them quickest: packed once into panels of a few columns, one behind the other."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.cpu.structs import KINDS, Matrix

PAIRS, ROUNDING_PAIRS = 3, 4
"""Of packed bfloat16: two inputs of a column lie side by side. In products of the second kind, which weights of that
dtype have, rows may be rounded to it too: some processors multiply pairs by themselves."""


class Panels(NamedTuple):
    """A linear layer's weight [columns, inputs], packed."""

    storage: Tensor
    """[num_panels, inputs, width]; of bfloat16 [num_panels, ceil(inputs / 2), width, 2]. Beyond the weight it is 0.
    Float32 numbers that bfloat16 holds, as most checkpoints store them, are held so: in half the memory, and read in
    half the time; a product has the bits that it has otherwise."""
    parts: tuple[int, ...]
    """Columns that products read together: each part begins a panel."""
    inputs: int
    dtype: torch.dtype
    """Of the weight."""
    bias: Tensor | None
    """float32 [columns]"""
    matrices: ctypes.Array
    """The parts as the C++ reads them; whoever holds these holds the panels."""

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        width: int,
        parts: tuple[int, ...] | None = None,
        halve: bool | None = None,
        bias: Tensor | None = None,
    ) -> "Panels":
        """A copy of a weight [columns, inputs] on the CPU, of any dtype of `KINDS` and with any strides.

        Args:
            width: columns of a panel, as the library has it.
            parts: of the columns, side by side; None is one.
            halve: hold float32 as bfloat16, which loses nothing; None does so where that is true.
            bias: float32 [columns].
        """
        columns, inputs = weight.shape
        halve = fits_bfloat16(weight) if halve is None else halve
        held = torch.bfloat16 if halve else weight.dtype
        parts, step = parts or (columns,), 2 if held == torch.bfloat16 else 1
        shape = (sum(-(-part // width) for part in parts), -(-inputs // step), width, step)
        storage = weight.new_zeros(shape, dtype=held)
        first = column = 0
        for part in parts:
            count = -(-part // width)
            _fill(storage[first : first + count], weight[column : column + part])
            first, column = first + count, column + part
        storage = storage.squeeze(3) if step == 1 else storage
        return cls(storage, parts, inputs, weight.dtype, bias, _matrices(storage, parts, weight.dtype, bias))

    def dense(self) -> Tensor:
        """A copy of the weight [columns, inputs], row by row."""
        num_panels, _, width = self.storage.shape[:3]
        by_step = self.storage.view(num_panels, -1, width, 2 if self.storage.dim() == 4 else 1)
        whole = by_step.permute(0, 2, 1, 3).reshape(num_panels * width, -1)[:, : self.inputs]
        found, begin = [], 0
        for part in self.parts:
            found.append(whole[begin : begin + part])
            begin += -(-part // width) * width
        return torch.cat(found).to(self.dtype)


def _matrices(storage: Tensor, parts: tuple[int, ...], dtype: torch.dtype, bias: Tensor | None) -> ctypes.Array:
    num_rows, width = storage.shape[1:3]
    kind = KINDS[dtype]
    if storage.dim() == 4:
        kind = ROUNDING_PAIRS if dtype == torch.bfloat16 else PAIRS
    panel_bytes, found, panel, column = storage[0].numel() * storage.itemsize, [], 0, 0
    for part in parts:
        address = None if bias is None else bias.data_ptr() + 4 * column
        found.append(Matrix(storage.data_ptr() + panel * panel_bytes, address, part, width, num_rows * width, kind))
        panel, column = panel + -(-part // width), column + part
    return (Matrix * len(found))(*found)


def rounded(matrix: Matrix) -> Matrix:
    """The same numbers, for products whose rows may be rounded to bfloat16 where they lie in pairs of it."""
    made = Matrix.from_buffer_copy(matrix)
    if made.kind == PAIRS:
        made.kind = ROUNDING_PAIRS
    return made


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether bfloat16 holds every number of a weight as it is."""
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    return not (weight.view(torch.int32) & 0xFFFF).any()


def _fill(panels: Tensor, weight: Tensor) -> None:
    """Put a weight [columns, inputs] into panels [num_panels, ceil(inputs / step), width, step] of zeros."""
    width, step = panels.shape[2:]
    columns, inputs = weight.shape
    whole, even = columns // width, inputs - inputs % step
    for part, source in ((panels[:whole], weight[: whole * width]), (panels[whole:], weight[whole * width :])):
        if not len(source):
            continue
        wide = len(source) // len(part)
        rows = source.unflatten(0, (len(part), wide)).transpose(1, 2)  # [panels, inputs, columns]
        part[:, : even // step, :wide].copy_(rows[:, :even].unflatten(1, (-1, step)).transpose(2, 3))
        if even < inputs:
            part[:, -1, :wide, 0].copy_(rows[:, -1])
