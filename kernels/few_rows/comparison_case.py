"""Comparison of the product of few rows with its reference, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.few_rows.product import few_rows_product


def _products(device: torch.device, shape: Shape) -> list[Tensor]:
    rows = (random_numbers(17, 7, 1280) / 36).to(shape.dtype).to(device)
    weight = random_numbers(18, 96, 1280, dtype=shape.dtype).to(device)
    ways = (few_rows_product(rows, weight), few_rows_product(rows, weight, weight[:, 3].contiguous(), gated=True))
    return [*ways, few_rows_product(rows, weight, total=ways[0].clone())]


CASES = {"few_rows_product": _products}
