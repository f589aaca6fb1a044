"""Chooses between the library's matrix product and the few-rows kernel for fused layers on a GPU, by timing at load.

Libraries are optimised for large matrix products. With few rows, a product takes the time to read the weight, and the
library splits the product into so few tiles that multiprocessors are idle. Library and kernel are timed on the GPU for
each shape and number of rows.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.few_rows.product import MOST_ROWS, few_rows_product, new_counters
from wingbeat.kernels.layer.reference import rms_norm, silu_mul
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, replay_ms
from wingbeat.runtime.verifier.layers import linears

logger = logging.getLogger(__name__)

ROWS = (1, 8, 16, MOST_ROWS)
"""Numbers of rows that are timed; other numbers of rows use the result of the next larger timed number."""
_SAMPLE, _REPEATS = 8, 7
"""`_SAMPLE`: number of weights of the same shape that are read in turn, so that no cache holds a weight when it is read
again. `_REPEATS`: number of timed repetitions.
"""
_LEAST_GAIN = 0.97
"""The kernel is chosen if the kernel's time is less than this fraction of the library's time."""


class Product:
    """Matrix product of rows and a weight [columns, inputs], computed with the library or with the few-rows kernel."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        adds: bool = False,
        gated: bool = False,
        norm: tuple[Tensor, float] | None = None,
    ) -> None:
        """Stores a weight.

        Args:
            adds: whether products are added to a total that the caller passes.
            gated: whether the weight stacks a gate projection and then an up projection, whose outputs the method
                `gated` combines.
            norm: weight and epsilon of a norm of the rows before the product.
        """
        self.weight, self.bias, self.adds, self.has_gates, self.norm = weight, bias, adds, gated, norm
        self.own: tuple[bool, ...] = (False,) * len(ROWS)
        """Whether the few-rows kernel is faster, for each number of rows in `ROWS`."""
        self._counters: Tensor | None = None

    def takes(self, num_rows: int) -> bool:
        """Whether the few-rows kernel is used for `num_rows` rows."""
        return num_rows <= MOST_ROWS and self.own[bisect_left(ROWS, num_rows)]

    def __call__(self, rows: Tensor) -> Tensor:
        """Computes [num_rows, inputs] -> [num_rows, columns]."""
        if self.takes(len(rows)) and not self.has_gates:  # for gated weights only the gated kernel was timed
            return self.ours(rows)
        return functional.linear(rows, self.weight, self.bias)

    def gated(self, rows: Tensor) -> Tensor:
        """Computes [num_rows, inputs] -> [num_rows, columns / 2]: silu(gate projection) * up projection."""
        return self.ours(rows) if self.takes(len(rows)) else silu_mul(functional.linear(rows, self.weight, self.bias))

    def faster(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Computes `ours` or `theirs`."""
        return self.ours(rows, total) if self.takes(len(rows)) else self.theirs(rows, total)

    def ours(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Computes the product with the few-rows kernel: gated if the weight has gates, added to `total` if given."""
        self.prepare()
        return few_rows_product(rows, self.weight, self.bias, total, self._counters, self.has_gates, self.norm)

    def prepare(self) -> None:
        """Allocates the kernel's counters, so that no captured pass allocates them."""
        if self._counters is None:
            self._counters = new_counters(self.weight)

    def theirs(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """Computes the same product with the library; may overwrite `total`."""
        if self.norm is not None:
            rows = rms_norm(rows, *self.norm)
        if total is not None and self.bias is None:
            return total.addmm_(rows, self.weight.t())
        out = functional.linear(rows, self.weight, self.bias)
        if total is not None:
            return total + out
        return silu_mul(out) if self.has_gates else out


def multiply(linear: nn.Linear, few: Product | None, rows: Tensor, total: Tensor | None = None) -> Tensor:
    """Computes a linear layer's product with the few-rows kernel if `few` takes so many rows, else with the layer.

    If `total` is given, returns `total` plus the product; may overwrite `total`.
    """
    if few is not None and few.takes(len(rows)):
        return few.ours(rows, total)
    return linears.product(linear, rows) if total is None else linears.add_product(linear, total, rows)


@torch.inference_mode()
def choose_products(kinds: dict[str, Sequence[Product]]) -> None:
    """Times the few-rows kernel and the library for each kind of product.

    All products of a kind then use the faster of the two.
    """
    found: list[str] = []
    graphs: CudaGraphDevice | None = None
    for name, products in kinds.items():
        weight = products[0].weight if products else None
        if weight is None or weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
            continue
        if not choice.compiled("few_rows_product", weight):
            continue
        # All kinds share a graph device: each `CudaGraphDevice` has a stream, and each stream a library workspace that
        # is never freed.
        graphs = graphs or CudaGraphDevice(weight.device)
        try:
            own = tuple(_is_faster(products[:_SAMPLE], num_rows, graphs) for num_rows in ROWS)
        except Exception as error:  # compilers and drivers raise many kinds of exceptions
            logger.info("products of %s keep using the library: %s", name, (str(error).splitlines() or [""])[0])
            continue
        for product in products:
            product.own = own
        found += [f"{name} by {num_rows} rows" for num_rows, faster in zip(ROWS, own, strict=True) if faster]
    if graphs is not None:
        logger.info("products for which the few-rows kernel is faster: %s", ", ".join(found) or "none")


@torch.inference_mode()
def choose_within(products: dict[str, Product], sample: Callable[[int], Callable[[], object]]) -> None:
    """Times a step with the library and with each product's few-rows kernel, for each number of rows in `ROWS`.

    Args:
        products: products of the step by name; each uses the faster of the two from now on.
        sample: function (number of rows) -> the step, which must be longer than the caches hold its weights.
    """
    graphs, found = CudaGraphDevice(next(iter(products.values())).weight.device), []
    for index, num_rows in enumerate(ROWS):
        step = sample(num_rows)
        best = replay_ms(step, graphs, _REPEATS)
        for name, product in products.items():
            before = product.own
            product.own = (*before[:index], True, *before[index + 1 :])
            ours = replay_ms(step, graphs, _REPEATS)
            if ours < best:
                best = ours
                found.append(f"{name} by {num_rows} rows")
            else:
                product.own = before
    logger.info("products of a draft level for which the few-rows kernel is faster: %s", ", ".join(found) or "none")


def _is_faster(products: Sequence[Product], num_rows: int, graphs: CudaGraphDevice) -> bool:
    weight = products[0].weight
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device).to(weight.dtype)
    total = weight.new_zeros(num_rows, len(weight)) if products[0].adds else None
    ours = replay_ms(lambda: [each.ours(rows, total) for each in products][-1], graphs, _REPEATS)
    return ours < _LEAST_GAIN * replay_ms(lambda: [each.theirs(rows, total) for each in products][-1], graphs, _REPEATS)
