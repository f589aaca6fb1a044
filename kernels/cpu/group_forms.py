"""Forms of the numbers of weights in groups: how they lie in panels that the C++ reads (`groups.h`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import E4M3, INT8, UINT4, UINT5, UINT6


class Layout(NamedTuple):
    """A form of numbers in panels, of which a unit of a few inputs lies in some rows of bytes."""

    kind: int
    """As `matrices.h` has it."""
    inputs: int
    """Of a unit; `rows` likewise."""
    rows: int
    unpack: Callable[[Tensor], Tensor]
    """uint8 [columns, rows] -> uint8 [columns, inputs]"""


def _from_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)


def _from_planes(num_bits: int) -> Callable[[Tensor], Tensor]:
    """Four bits of each number, and behind those of a unit a row of the `num_bits` above them."""
    inputs = 8 // num_bits

    def unpack(packed: Tensor) -> Tensor:
        units = packed.unflatten(1, (-1, inputs // 2 + 1))
        low = torch.stack([units[:, :, :-1] & 15, units[:, :, :-1] >> 4], dim=3).flatten(2)
        shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)
        return (low | (units[:, :, -1:] >> shifts & 2**num_bits - 1) << 4).flatten(1)

    return unpack


def _as_they_are(values: Tensor) -> Tensor:
    return values


LAYOUTS = {
    INT8: Layout(6, 2, 2, _as_they_are),
    UINT4: Layout(7, 2, 1, _from_nibbles),
    UINT5: Layout(8, 8, 5, _from_planes(1)),
    UINT6: Layout(9, 4, 3, _from_planes(2)),
    E4M3: Layout(10, 2, 2, _as_they_are),
}
