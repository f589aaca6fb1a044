"""Packs linear weights into panels of a few columns, stored consecutively, in which the C++ reads them fastest."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.cpu.eight_bits import EightBits, to_eight_bits
from wingbeat.kernels.cpu.structs import KINDS, Matrix

PAIRS, ROUNDING_PAIRS = 3, 4
"""Kinds of packed bfloat16, in which two inputs of a column are adjacent. `ROUNDING_PAIRS` is for weights whose
original dtype is bfloat16: products may round rows to bfloat16 too, because some processors multiply pairs natively."""
BYTES = 5
"""Kind of packed int8 weights. The sum of a column is multiplied by the column's scale."""


class Panels(NamedTuple):
    """Packed weight [columns, inputs] of a linear layer."""

    storage: Tensor
    """[num_panels, inputs, width]; for bfloat16 [num_panels, ceil(inputs / 2), width, 2]. Padding is 0. Float32 weights
    that bfloat16 represents exactly, as in most checkpoints, are stored as bfloat16, which halves memory and reading
    time. Products are bit-identical. For int8 the elements are integers, which `scales` multiply."""
    parts: tuple[int, ...]
    """Number of columns of each part of a fused matrix product; each part begins at a new panel."""
    inputs: int
    dtype: torch.dtype
    """Dtype of the original weight."""
    bias: Tensor | None
    """float32 [columns]."""
    scales: Tensor | None
    """float32 [columns] for int8 storage, else None."""
    matrices: ctypes.Array
    """The parts in the C++ format; their pointers point into `storage`."""
    order: None = None
    """Input order, as in `GroupPanels`; always None, because inputs are stored in order."""

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        width: int,
        parts: tuple[int, ...] | None = None,
        held: torch.dtype | None = None,
        bias: Tensor | None = None,
    ) -> "Panels":
        """Packs a copy of a weight [columns, inputs] on the CPU, of any dtype of `KINDS` and with any strides.

        Args:
            width: columns of a panel, as given by the library.
            parts: numbers of columns of adjacent parts; None is a single part.
            held: storage dtype: the weight's own, a 2-byte dtype that represents the float32 numbers exactly, or int8,
                to which the weight is rounded (`to_eight_bits`). None is bfloat16 if that is lossless, else the
                weight's own.
            bias: float32 [columns].
        """
        columns, inputs = weight.shape
        if held is None:
            held = torch.bfloat16 if fits_bfloat16(weight) else weight.dtype
        values, scales = to_eight_bits(weight) if held == torch.int8 else (weight, None)
        parts, step = parts or (columns,), 2 if held == torch.bfloat16 else 1
        shape = (sum(-(-part // width) for part in parts), -(-inputs // step), width, step)
        storage = weight.new_zeros(shape, dtype=held)
        first = column = 0
        for part in parts:
            count = -(-part // width)
            _fill(storage[first : first + count], values[column : column + part])
            first, column = first + count, column + part
        storage = storage.squeeze(3) if step == 1 else storage
        matrices = _matrices(storage, parts, weight.dtype, bias, scales)
        return cls(storage, parts, inputs, weight.dtype, bias, scales, matrices)

    def nbytes(self) -> int:
        """Bytes of storage and scales, without the bias."""
        return self.storage.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dense(self) -> Tensor:
        """Unpacks a copy of the weight [columns, inputs], row-major."""
        num_panels, _, width = self.storage.shape[:3]
        by_step = self.storage.view(num_panels, -1, width, 2 if self.storage.dim() == 4 else 1)
        whole = by_step.permute(0, 2, 1, 3).reshape(num_panels * width, -1)[:, : self.inputs]
        found, begin = [], 0
        for part in self.parts:
            found.append(whole[begin : begin + part])
            begin += -(-part // width) * width
        held = torch.cat(found)
        return (held if self.scales is None else EightBits(held, self.scales).dense()).to(self.dtype)


def _matrices(
    storage: Tensor, parts: tuple[int, ...], dtype: torch.dtype, bias: Tensor | None, scales: Tensor | None
) -> ctypes.Array:
    num_rows, width = storage.shape[1:3]
    kind = KINDS[dtype] if scales is None else BYTES
    if storage.dim() == 4:
        kind = ROUNDING_PAIRS if dtype == torch.bfloat16 else PAIRS
    panel_bytes, found, panel, column = storage[0].numel() * storage.itemsize, [], 0, 0
    for part in parts:
        own = [None if vector is None else vector.data_ptr() + 4 * column for vector in (bias, scales)]
        begin, size = storage.data_ptr() + panel * panel_bytes, num_rows * width
        found.append(Matrix(begin, own[0], part, width, size, kind, own[1]))
        panel, column = panel + -(-part // width), column + part
    return (Matrix * len(found))(*found)


def rounded(matrix: Matrix) -> Matrix:
    """Copy of a matrix whose products may round rows to bfloat16 if the matrix is stored as bfloat16 pairs."""
    made = Matrix.from_buffer_copy(matrix)
    if made.kind == PAIRS:
        made.kind = ROUNDING_PAIRS
    return made


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether bfloat16 represents every element of a weight exactly."""
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    return not (weight.view(torch.int32) & 0xFFFF).any()


def _fill(panels: Tensor, weight: Tensor) -> None:
    """Writes a weight [columns, inputs] to zeroed panels [num_panels, ceil(inputs / step), width, step]."""
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
