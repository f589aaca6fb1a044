"""Forms of the numbers of weights in groups: how they lie in panels that the C++ reads (`groups.h`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import E4M3, INT8, UINT4, UINT5, UINT6


class Layout(NamedTuple):
    """A form of numbers in panels: units of a few inputs, each of which is one field behind another."""

    kind: int
    """As `matrices.h` has it."""
    inputs: int
    """Of a unit."""
    fields: tuple[int, ...]
    """Bytes of a column in each field of a unit."""
    unpack: Callable[[Tensor], Tensor]
    """uint8 [columns, units, bytes] -> uint8 [columns, units, inputs]"""

    @property
    def rows(self) -> int:
        """Bytes of a unit and column."""
        return sum(self.fields)


def _from_nibbles(units: Tensor) -> Tensor:
    return torch.cat([units & 15, units >> 4], dim=2)


def _from_planes(num_bits: int) -> Callable[[Tensor], Tensor]:
    """Four bits of each number, and behind those of a unit the `num_bits` above them."""

    def unpack(units: Tensor) -> Tensor:
        shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)
        high = (units[:, :, 4:, None] >> shifts & 2**num_bits - 1).flatten(2)
        return _from_nibbles(units[:, :, :4]) | high << 4

    return unpack


def _as_they_are(units: Tensor) -> Tensor:
    return units


LAYOUTS = {
    INT8: Layout(6, 4, (4,), _as_they_are),
    UINT4: Layout(7, 8, (4,), _from_nibbles),
    UINT5: Layout(8, 8, (4, 1), _from_planes(1)),
    UINT6: Layout(9, 8, (4, 2), _from_planes(2)),
    E4M3: Layout(10, 2, (1, 1), _as_they_are),
}
