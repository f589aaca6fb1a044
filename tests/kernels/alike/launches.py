"""Launches of products in which rows are alike, for `compile_launches`."""

import torch

from wingbeat.kernels.alike import triton as triton_alike
from wingbeat.kernels.alike.product import AlikeWeight


def launch_all() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for columns in (512, 6144):  # with splits and without
            weight = AlikeWeight.wrap(torch.zeros(columns, 1024 if columns == 512 else 256, dtype=dtype))
            for num_rows in (1, 32, 64, 2048):
                rows = weight.weight.new_zeros(num_rows, weight.weight.shape[1])
                triton_alike.product(rows, weight, rows.new_zeros(columns), rows.new_zeros(num_rows, columns), True)
