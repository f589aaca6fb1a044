"""Comparison of the gated delta rule with its reference, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.state.reference import delta_rule
from wingbeat.kernels.state.rows import TreeRows


def over_trees(device: torch.device, shape: Shape) -> list[Tensor]:
    """Runs the gated delta rule over two trees on a device."""
    num_reqs, num_nodes, dim = 2, 7, min(shape.head_dim, 128)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 3, 4, 5]], device=device)
    rows = TreeRows.of(torch.tensor([2, 0], device=device), parents, num_nodes - 1, 1)
    query, key = (random_numbers(seed, num_reqs, num_nodes, 2, dim, dtype=shape.dtype).to(device) for seed in (17, 18))
    value = random_numbers(19, num_reqs, num_nodes, 4, dim, dtype=shape.dtype).to(device)
    decay, beta = (random_numbers(seed, num_reqs, num_nodes, 4).to(device) for seed in (20, 21))
    states = random_numbers(22, 3, 4, dim, dim).to(device)
    out, added = delta_rule(query, key, value, -decay.abs(), beta.sigmoid(), states, rows, 1e-6)
    return [out, *added]


CASES = {"delta_rule": over_trees}
