"""Launches of the recurrence over trees, for `compile_launches`."""

import torch

from wingbeat.kernels.state import triton as triton_state
from wingbeat.kernels.state.rows import TreeRows


def launch_all() -> None:
    for num_nodes in (1, 16):
        launch_recurrences(4, num_nodes, (16, 32), 128)


def launch_recurrences(num_reqs: int, num_nodes: int, heads: tuple[int, int], dim: int) -> None:
    keys = torch.zeros(num_reqs, num_nodes, heads[0], dim, dtype=torch.bfloat16)
    value = keys.new_zeros(num_reqs, num_nodes, heads[1], dim)
    decay, states = torch.zeros(num_reqs, num_nodes, heads[1]), torch.zeros(num_reqs + 1, heads[1], dim, dim)
    parents = torch.zeros(num_reqs, num_nodes, dtype=torch.int64)
    rows = TreeRows.of(parents[:, 0], parents, 0, 1)
    triton_state.delta_rule(keys, keys, value, decay, decay.to(torch.bfloat16), states, rows, 1e-6)
