"""Comparison of the batch-invariant matrix product with its reference, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.alike.product import AlikeWeight
from wingbeat.kernels.comparison_inputs import Shape, random_numbers


def _product(device: torch.device, shape: Shape) -> list[Tensor]:
    """Returns two products for each tile height: one stored in float32, and one added to a total."""
    weight = AlikeWeight.wrap(random_numbers(31, 200, 1100, dtype=shape.dtype).to(device))
    bias, outs = random_numbers(32, 200, dtype=shape.dtype).to(device), []
    for count in (3, 20, 50, 100):
        rows = random_numbers(33, count, 1100, dtype=shape.dtype).to(device)
        outs.append(weight.product(rows, bias, torch.float32))
        outs.append(weight.add_product(outs[-1].to(shape.dtype), rows, None))
    return outs


CASES = {"alike_product": _product}
