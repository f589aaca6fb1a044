"""Comparison of the products by experts' weights with their reference, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.experts.product import Routes, grouped_product


def _products(device: torch.device, shape: Shape) -> list[Tensor]:
    rows = random_numbers(11, 24, 96, dtype=shape.dtype).to(device)
    weight = random_numbers(12, 5, 80, 96, dtype=shape.dtype).to(device)
    chosen = (torch.arange(24)[:, None] * torch.tensor([1, 2]) % 5).to(device)
    routes = Routes.of(chosen, 5)
    each = grouped_product(rows, weight, weight[:, :, 0], routes)
    return [each, grouped_product(each, weight.mT.contiguous()[:, :, :80], None, routes)]


CASES = {"grouped_product": _products}
