"""Forms of the numbers of weights in groups: how they lie in panels that the C++ reads (`groups.h`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """A form of numbers, of which a unit of a few inputs lies in some rows of bytes."""

    kind: int
    """As `matrices.h` has it."""
    inputs: int
    """Of a unit."""
    pack: Callable[[Tensor], Tensor]
    """uint8 [panels, inputs, width] -> uint8 [panels, rows, width]"""
    unpack: Callable[[Tensor], Tensor]
    """The inverse."""
    floats: Callable[[Tensor], Tensor]
    """The numbers in float32 that uint8 stand for."""


def _nibbles(values: Tensor) -> Tensor:
    return values[:, ::2] & 15 | values[:, 1::2] << 4


def _from_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1, 2)


def _planes(num_bits: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Four bits of each number, and behind those of a unit a row of the `num_bits` above them."""
    inputs = 8 // num_bits

    def pack(values: Tensor) -> Tensor:
        units = values.unflatten(1, (-1, inputs))
        more = torch.zeros_like(units[:, :, 0])
        for index in range(inputs):
            more |= units[:, :, index] >> 4 << num_bits * index
        low = units[:, :, ::2] & 15 | units[:, :, 1::2] << 4
        return torch.cat([low, more[:, :, None]], dim=2).flatten(1, 2)

    def unpack(packed: Tensor) -> Tensor:
        units = packed.unflatten(1, (-1, inputs // 2 + 1))
        low = torch.stack([units[:, :, :-1] & 15, units[:, :, :-1] >> 4], dim=3).flatten(2, 3)
        shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)[:, None]
        return (low | (units[:, :, -1:] >> shifts & 2**num_bits - 1) << 4).flatten(1, 2)

    return pack, unpack


def _e2m1(values: Tensor) -> Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return torch.cat([table, -table])[values.int()]


def _as_they_are(values: Tensor) -> Tensor:
    return values


INT8 = Form(6, 2, _as_they_are, _as_they_are, lambda values: values.view(torch.int8).float())
UINT4 = Form(7, 2, _nibbles, _from_nibbles, Tensor.float)
UINT5 = Form(8, 8, *_planes(1), Tensor.float)
UINT6 = Form(9, 4, *_planes(2), Tensor.float)
E4M3 = Form(10, 2, _as_they_are, _as_they_are, lambda values: values.view(torch.float8_e4m3fn).float())
E2M1 = Form(11, 2, _nibbles, _from_nibbles, _e2m1)
