"""Adds LoRA adapters to matrix products, out += (x a) b: torch reference (arXiv 2106.09685).

Each row has its own adapter, or none. On CUDA `adapters_triton` reads the rows' adapter ids on the device; `native.h`
is the CPU implementation.
"""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters


def add_adapters(out: Tensor, x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> Tensor:
    """Adds to each row of a matrix product the output of the row's adapter, in place.

    Args:
        out: [num_rows, outputs], in the dtype of the adapters.
        x: [num_rows, inputs], in the dtype of the adapters.

    Raises:
        ValueError: the number of rows differs from that of `rows`. On CUDA: a tensor is not contiguous.
    """
    if len(out) != len(rows.ids) or len(x) != len(rows.ids):
        raise ValueError(f"an adapted product has {len(x)} rows: the batch has {len(rows.ids)}")
    if kernels := choice.compiled("add_adapters", x):
        return kernels.add_adapters(out, x, adapters, rows.tiles)
    if rows.runs is None:
        for adapter_id in range(1, len(adapters.a) + 1):
            # Each adapter multiplies all rows, with the rows of other adapters set to zero, so that the host need not
            # read ids.
            own = torch.where((rows.ids == adapter_id)[:, None], x, 0)
            _add(out, own, adapters, adapter_id, adapters.rank)
        return out
    for adapter_id, begin, end in rows.runs:
        if rank := int(adapters.ranks[adapter_id]):
            _add(out[begin:end], x[begin:end], adapters, adapter_id, rank)
    return out


def _add(out: Tensor, x: Tensor, adapters: StackedAdapters, adapter_id: int, rank: int) -> None:
    low, first = x @ adapters.a[adapter_id - 1], 0
    for part, columns in enumerate(adapters.parts):
        own = low[:, part * adapters.rank : part * adapters.rank + rank]
        into = slice(first, first + columns)
        out[:, into].addmm_(own, adapters.b[adapter_id - 1, :rank, into])
        first += columns
