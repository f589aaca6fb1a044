"""Products by packed weights, as `wingbeat.kernels.gpu.comparison` compares them."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.grouped_weight import UINT4, GroupedWeight, Scales
from wingbeat.kernels.packed.matrix import lay, packed_product, unpack


def of_four_bits(device: torch.device, shape: Shape) -> list[Tensor]:
    """A product of few rows and its weight's numbers."""
    values = torch.arange(96 * 1024).view(96, 1024) * 7 % 16
    scales, minima = (Scales(random_numbers(seed, 96, 32, dtype=torch.float16)) for seed in (23, 24))
    matrix = lay(GroupedWeight(UINT4, values.to(torch.uint8), scales, minima)).to(device)
    inputs = random_numbers(25, 5, 1024, dtype=shape.dtype).to(device)
    return [packed_product(inputs, matrix), unpack(matrix, shape.dtype)]


CASES = {"packed_product": of_four_bits}
