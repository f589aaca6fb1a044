"""Compares matrix products of packed weights with their reference, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.grouped_weight import E2M1, E4M3, INT8, UINT4, UINT6, GroupedWeight, Scales
from wingbeat.kernels.packed.experts import Routes, experts_product
from wingbeat.kernels.packed.matrix import PackedMatrix, packed_product, to_step_layout, unpack

_COLUMNS, _INPUTS, _EXPERTS = 96, 1024, 4


def _weights() -> list[GroupedWeight]:
    """Returns a weight in each number format; together the weights have every kind of scales and shifts."""
    values = (torch.arange(_COLUMNS * _INPUTS).view(_COLUMNS, _INPUTS) * 7 % 251).to(torch.uint8)
    floats = [random_numbers(23 + seed, _COLUMNS, _INPUTS // 32, dtype=torch.float16) / 8 for seed in range(2)]
    whole, by = (
        (values[:, :: _INPUTS // 32] % 64),
        random_numbers(25, _COLUMNS, _INPUTS // 256, dtype=torch.float16) / 99,
    )
    zeros = values[:, 1 :: _INPUTS // 32] % 16
    return [
        GroupedWeight(UINT4, values % 16, Scales(floats[0]), Scales(floats[1])),
        GroupedWeight(UINT4, values % 16, Scales(floats[0]), zeros=zeros),
        GroupedWeight(UINT6, values % 64, Scales(whole, by), offset=-32.0),
        GroupedWeight(INT8, values, Scales(floats[0] / 8)),
        GroupedWeight(E4M3, values % 120 | values & 128, Scales(floats[0].float() / 64)),
        GroupedWeight(E2M1, values % 16, Scales(floats[0].bfloat16())),
    ]


def of_every_form(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns for each format: a product of few rows, stored and added to a total; the unpacked weight; and products
    with experts' weights.
    """
    inputs = random_numbers(26, 5, _INPUTS, dtype=shape.dtype).to(device)
    bias = random_numbers(27, _COLUMNS, dtype=shape.dtype).to(device)
    chosen = torch.tensor([[0, 2], [3, 0], [2, 3], [0, 3], [2, 0]], device=device)
    found = []
    for weight in _weights():
        matrix: PackedMatrix = to_step_layout(weight).to(device)
        total = inputs[:, :_COLUMNS].contiguous()
        found += [packed_product(inputs, matrix), packed_product(inputs, matrix, bias, total, add=True)]
        found += [
            unpack(matrix, shape.dtype),
            experts_product(inputs, matrix, bias.float(), Routes.of(chosen, _EXPERTS)),
        ]
    return found


CASES = {"packed_product": of_every_form}
