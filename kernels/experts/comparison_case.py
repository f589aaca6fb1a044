"""Comparison of a mixture's steps with their references, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.experts.product import Gate, Routes, grouped_product, sum_choices
from wingbeat.kernels.experts.router import Rule, choose


def _mixture(device: torch.device, shape: Shape) -> list[Tensor]:
    """The steps of a mixture with its gates side by side, and interleaved with biases."""
    rows = random_numbers(11, 24, 96, dtype=shape.dtype).to(device)
    weight = random_numbers(12, 6, 80, 96, dtype=shape.dtype).to(device)
    logits = (torch.arange(24)[:, None] * torch.arange(1, 7) % 7).to(device, shape.dtype)
    found = []
    for rule, gate, bias in (
        (Rule(2), Gate(), None),
        (Rule(2, sigmoid=True, least=1e-20), Gate(True, 1.7, 1.0, 1.0), weight[:, :, 0]),
        (Rule(2, sigmoid=True, num_groups=3, kept_groups=2, group_best=2), Gate(), None),
    ):
        weights, chosen = choose(logits, None if bias is None else bias[:, 0].float(), rule)
        routes = Routes.of(chosen, 6)
        made = grouped_product(rows, weight, bias, routes, gate)
        each = grouped_product(made, weight.mT.contiguous()[:, :, :40], None, routes)
        found += [chosen, weights, made, each, sum_choices(each, weights)]
    return found


CASES = {"grouped_product": _mixture}
