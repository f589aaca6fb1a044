"""Launches of adapters, for `compile_launches`."""

import torch

from wingbeat.kernels.lora import adapters_triton
from wingbeat.kernels.lora.stacked_adapters import StackedAdapters, tiles_of


def launch_all() -> None:
    launch_adapters(128, 4096, (4096, 1024, 1024), 16)
    launch_adapters(1, 14336, (4096,), 64)


def launch_adapters(num_rows: int, inputs: int, parts: tuple[int, ...], rank: int) -> None:
    adapters = StackedAdapters.empty(8, rank, inputs, parts, torch.bfloat16, torch.device("cpu"))
    out, x = torch.zeros(num_rows, sum(parts), dtype=torch.bfloat16), torch.zeros(num_rows, inputs).to(torch.bfloat16)
    adapters_triton.add_adapters(out, x, adapters, tiles_of(torch.zeros(num_rows, dtype=torch.int64), 8))
