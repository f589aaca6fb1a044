"""Launches of products by packed weights, for `compile_launches`."""

import torch

from tests.kernels.packed.weights import KINDS, grouped_weight
from wingbeat.kernels.packed import triton as triton_packed
from wingbeat.kernels.packed.matrix import FEW_ROWS, to_step_layout


def launch_all() -> None:
    for kind in KINDS:
        matrix = to_step_layout(grouped_weight(kind, 512, 4096))
        for num_rows in (1, FEW_ROWS):
            rows = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
            triton_packed.packed_product(rows, matrix, rows[0, :512], rows.new_zeros(num_rows, 512), add=True)
        triton_packed.unpack(matrix, torch.bfloat16, torch.zeros(3, dtype=torch.int64))
