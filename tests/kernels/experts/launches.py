"""Launches of products by experts' weights, for `compile_launches`."""

import torch

from wingbeat.kernels.experts import triton as triton_experts
from wingbeat.kernels.experts.product import Routes


def launch_all() -> None:
    for num_rows, inputs, columns in ((60, 4096, 14336), (1, 2880, 9728)):
        rows, experts = (torch.zeros(*size, inputs, dtype=torch.bfloat16) for size in ((num_rows,), (8, columns)))
        chosen = torch.zeros(num_rows, 4, dtype=torch.int64)
        for weight, bias in ((experts, None), (rows.new_zeros(8, inputs, columns).mT, experts[:, :, 0])):
            out = rows.new_zeros(4 * num_rows, columns)
            triton_experts.grouped_product(rows, weight, bias, out, Routes.of(chosen, 8))
