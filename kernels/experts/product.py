"""Matrix products of rows with their experts' weights: torch reference; GPUs use `kernels.experts.triton`.

Each step takes one launch: the routes, a product with the gate behind it, a product, and the sum of a row's experts.
Rows are sorted by the expert to which they are routed, and each expert's rows are cut into blocks of one height. The
number of blocks is known only on the device. The grid has programs for the largest possible number of blocks, so the
host need not wait for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice

LEAST_HEIGHT, MOST_HEIGHT = 16, 64
"""Minimum and maximum number of rows of a block."""
FEW_ROWS, FEW_HEIGHT = 512, 32
"""Passes of at most `FEW_ROWS` rows have blocks of at most `FEW_HEIGHT` rows. A row's bits then do not depend on the
number of rows, because GPUs have other instructions for blocks of 64 rows.
"""


class Gate(NamedTuple):
    """Activation of gated experts: gate * sigmoid(alpha * gate) * (up + shift), with gate and up clamped first."""

    interleaved: bool = False
    """Whether columns of gate and up alternate, instead of all gates before all ups."""
    alpha: float = 1.0
    limit: float = float("inf")
    """Upper bound of the gate, and bound of up's magnitude."""
    shift: float = 0.0

    def apply(self, gate_up: Tensor) -> Tensor:
        """Computes [..., 2 * size] -> [..., size]."""
        parts = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        gate, up = parts[0].clamp(max=self.limit), parts[1].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)


class Shared(NamedTuple):
    """Weights of an expert that all rows share, computed as `count` experts whose ids follow those of the others."""

    count: int
    weights: tuple[Tensor, ...]
    """Contiguous, of linear layers: gate and up [count * size, inputs] each; or down [columns, count * size]."""

    def parts(self) -> list[Tensor]:
        """Returns the weight of each expert: [columns, inputs], gates before ups."""
        if len(self.weights) == 1:
            return list(self.weights[0].chunk(self.count, dim=1))
        return [torch.cat(pair) for pair in zip(*(one.chunk(self.count) for one in self.weights), strict=True)]


class Routes(NamedTuple):
    """Assignment of rows to experts, several experts per row."""

    order: Tensor
    """int64 [num_rows * choices]: indices of the (row, choice) pairs in row-major order, sorted by expert."""
    blocks: Tensor
    """int32 [3, blocks]: expert, or -1 for an unused block; first and last index of the block's rows in `order`."""
    height: int
    """Maximum number of rows of a block."""
    num_experts: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> "Routes":
        """Builds routes from chosen experts, int [num_rows, choices], without waiting for the device."""
        flat, count = chosen.flatten(), chosen.numel()
        height, most = LEAST_HEIGHT, FEW_HEIGHT if len(chosen) <= FEW_ROWS else MOST_HEIGHT
        while height < min(count // num_experts, most):
            height *= 2
        num_blocks = min(count, num_experts) + count // height
        if kernels := choice.compiled("grouped_product", flat):
            return cls(*kernels.routes(flat, num_experts, num_blocks, height), height, num_experts)
        order = flat.argsort(stable=True)
        rows = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        rows.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
        ends, blocks_ends = rows.cumsum(0), ((rows + height - 1) // height).cumsum(0)
        block = torch.arange(num_blocks, device=flat.device)
        expert = torch.searchsorted(blocks_ends, block, right=True)
        known = expert.clamp(max=num_experts - 1)
        before = blocks_ends[known] - (rows[known] + height - 1) // height
        first = ends[known] - rows[known] + (block - before) * height
        last = torch.minimum(first + height, ends[known]) - 1
        expert = torch.where(expert < num_experts, expert, -1)
        return cls(order, torch.stack([expert, first, last]).int(), height, num_experts)


def grouped_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routes: Routes,
    gate: Gate | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """Multiplies rows by their experts' weights, summing in float32.

    Args:
        rows: [num_rows, inputs], one per token; or [num_rows * choices, inputs], one per choice.
        weight: [num_experts, columns, inputs], of any strides.
        bias: [num_experts, columns].
        gate: activation of the columns; None returns them as they are.
        shared: weights of further experts, if there is no bias and no interleaved gate.

    Returns:
        [num_rows * choices, columns, or half as many with a gate] in the rows' dtype, ordered by row, then by choice.
    """
    out = rows.new_empty(len(routes.order), weight.shape[1] // (1 if gate is None else 2))
    if kernels := choice.compiled("grouped_product", rows):
        kernels.grouped_product(rows.contiguous(), weight, bias, out, routes, gate, shared)
        return out
    weights = [*weight, *(() if shared is None else shared.parts())]
    choices = len(out) // max(len(rows), 1)
    for expert, first, last in routes.blocks.t().tolist():
        if expert >= 0:
            places = routes.order[first : last + 1]
            own = functional.linear(rows[places // choices].float(), weights[expert].float())
            own = own if bias is None else own + bias[expert].float()
            out[places] = (own if gate is None else gate.apply(own)).to(out.dtype)
    return out


def sum_choices(each: Tensor, weights: Tensor) -> Tensor:
    """Adds a row's experts in the order of its choices, in float32.

    Args:
        each: [num_rows * choices, size], ordered by row, then by choice.
        weights: [num_rows, choices], of any floating dtype.

    Returns:
        [num_rows, size] in the dtype of `each`.
    """
    if kernels := choice.compiled("grouped_product", each):
        return kernels.sum_choices(each, weights)
    return (each.view(*weights.shape, -1).float() * weights[:, :, None]).sum(dim=1).to(each.dtype)
