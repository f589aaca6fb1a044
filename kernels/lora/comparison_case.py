"""Comparison of the adapter kernels with their reference, for `wingbeat.kernels.gpu.comparison`."""

import torch
from torch import Tensor

from wingbeat.kernels.comparison_inputs import Shape, random_numbers
from wingbeat.kernels.lora.adapters import add_adapters
from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters


def of_two_adapters(device: torch.device, shape: Shape) -> list[Tensor]:
    """Applies two adapters to rows on a device."""
    stacked = StackedAdapters.empty(2, 8, 64, (96, 32), shape.dtype, torch.device("cpu"))
    for adapter_id, part in ((1, 0), (1, 1), (2, 1)):
        outputs = stacked.parts[part]
        a, b = random_numbers(adapter_id, 8, 64) / 8, random_numbers(20 + adapter_id, outputs, 8) / 3
        stacked.put(adapter_id, part, a, b)
    on_device = StackedAdapters(*(part.to(device) for part in stacked[:3]), stacked.parts)
    ids = torch.tensor([1, 0, 2, 2, 1, 0, 1], device=device)
    out, x = (random_numbers(13, 7, width, dtype=shape.dtype).to(device) for width in (128, 64))
    return [add_adapters(out, x, on_device, AdapterRows.of(ids, 2, on_host=False))]


CASES = {"add_adapters": of_two_adapters}
