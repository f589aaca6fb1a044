"""Products of fused layers on a GPU: the device's own, or ours of few rows where these were faster at load.

Libraries have kernels for large products. With few rows, reading the weight is all there is to do, and few tiles of it
leave multiprocessors idle. Both are held against each other on the card, by shape and number of rows.
"""

import logging
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.layer.products import MOST_ROWS, few_rows_product, new_counters
from wingbeat.kernels.layer.reference import silu_mul
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice

logger = logging.getLogger(__name__)

ROWS = (1, 8, 16, MOST_ROWS)
"""Numbers of rows that are measured; others are as the next larger one."""
_SAMPLE, _REPEATS = 8, 7
"""Weights of a shape that are read in turn, which no cache holds; and how often."""
_LEAST_GAIN = 0.97
"""Of the library's time: what must be saved for ours to be taken."""


class Product:
    """Products of rows by one weight [columns, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, adds: bool = False, gated: bool = False) -> None:
        """Take a weight.

        Args:
            adds: products are added to a total.
            gated: gates come first, then ups, of which `gated` makes one.
        """
        self.weight, self.bias, self.adds, self.has_gates = weight, bias, adds, gated
        self.own: tuple[bool, ...] = (False,) * len(ROWS)
        """By number of rows, as `ROWS`: whether ours is faster."""
        self._counters: Tensor | None = None

    def takes(self, num_rows: int) -> bool:
        """Whether ours is taken for so many rows."""
        return num_rows <= MOST_ROWS and self.own[bisect_left(ROWS, num_rows)]

    def __call__(self, rows: Tensor) -> Tensor:
        """[num_rows, inputs] -> [num_rows, columns]"""
        if self.takes(len(rows)) and not self.has_gates:  # what was measured is another way of products with gates
            return self.ours(rows)
        return functional.linear(rows, self.weight, self.bias)

    def gated(self, rows: Tensor) -> Tensor:
        """[num_rows, inputs] -> [num_rows, columns / 2]: silu of the gates, times the ups."""
        return self.ours(rows) if self.takes(len(rows)) else silu_mul(functional.linear(rows, self.weight, self.bias))

    def ours(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """By our kernel, in the way that the product has."""
        if self._counters is None:
            self._counters = new_counters(self.weight)
        return few_rows_product(rows, self.weight, self.bias, total, self._counters, self.has_gates)

    def theirs(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Likewise by the library."""
        if total is not None:
            return total.addmm_(rows, self.weight.t())
        out = functional.linear(rows, self.weight, self.bias)
        return silu_mul(out) if self.has_gates else out


@torch.inference_mode()
def choose_products(kinds: dict[str, Sequence[Product]]) -> None:
    """Hold ours against the library's for products of each kind, which have one shape, and let the faster one run."""
    found: list[str] = []
    graphs: CudaGraphDevice | None = None
    for name, products in kinds.items():
        weight = products[0].weight if products else None
        if weight is None or weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
            continue
        if not choice.compiled("few_rows_product", weight):
            continue
        # One for all: each has a stream, and each stream a workspace of the library's that is never freed.
        graphs = graphs or CudaGraphDevice(weight.device)
        try:
            own = tuple(_is_faster(products[:_SAMPLE], num_rows, graphs) for num_rows in ROWS)
        except Exception as error:  # compilers and drivers raise whatever they like
            logger.info("products of %s stay the library's: %s", name, (str(error).splitlines() or [""])[0])
            continue
        for product in products:
            product.own = own
        found += [f"{name} by {num_rows} rows" for num_rows, faster in zip(ROWS, own, strict=True) if faster]
    if graphs is not None:
        logger.info("products by our kernel, which were faster here: %s", ", ".join(found) or "none")


def _is_faster(products: Sequence[Product], num_rows: int, graphs: CudaGraphDevice) -> bool:
    weight = products[0].weight
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device).to(weight.dtype)
    total = weight.new_zeros(num_rows, len(weight)) if products[0].adds else None
    ours = replay_ms(lambda: [each.ours(rows, total) for each in products][-1], graphs)
    return ours < _LEAST_GAIN * replay_ms(lambda: [each.theirs(rows, total) for each in products][-1], graphs)


def replay_ms(step: Callable[[], Tensor], graphs: CudaGraphDevice) -> float:
    """Median milliseconds of a step replayed as a CUDA graph: launched one by one, the host is what takes time."""
    graphs.warm_up(step)
    graph, _ = graphs.capture(step, graphs.new_pool())
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs.replay(graph)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
