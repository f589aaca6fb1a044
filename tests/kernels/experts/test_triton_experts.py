"""Products by experts' weights: the kernel against the reference, and that against row by row."""

import pytest
import torch

from tests.kernels.drawn import draw
from wingbeat.kernels.experts.product import Routes, grouped_product

pytestmark = [pytest.mark.few(5), pytest.mark.usefixtures("poisoned_memory")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2}
"""Triton's interpreter multiplies no matrices of bfloat16."""


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("transposed", [False, True], ids=["by output", "by input"])
@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 8), (5, 3), (150, 4), (64, 1)])
def test_groups_are_multiplied_as_row_by_row(num_rows, num_experts, transposed, biased, dtype):
    """Some experts have no row; columns and inputs fill no tile; the first choices are of the same expert."""
    kernels = pytest.importorskip("wingbeat.kernels.experts.triton")
    choices = min(2, num_experts)
    rows, weight = draw(num_rows, 70, dtype=dtype, seed=1), draw(num_experts, 90, 70, dtype=dtype, seed=2) / 8
    bias = draw(num_experts, 90, dtype=dtype, seed=3) if biased else None
    picked = torch.randint(num_experts, (num_rows, 1), generator=torch.Generator().manual_seed(4))
    chosen = (picked + torch.arange(choices)) % num_experts
    routes = Routes.of(chosen, num_experts)
    each = [(row, int(one)) for row in range(num_rows) for one in chosen[row]]
    expected = torch.stack([rows[row].double() @ weight[one].double().t() for row, one in each])
    if bias is not None:
        expected += bias[chosen.flatten()].double()
    by_reference = grouped_product(rows, weight, bias, routes)
    there = weight.mT.contiguous().mT if transposed else weight
    out = torch.empty(num_rows * choices, 90, dtype=dtype, device=DEVICE)
    moved = Routes(*(part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in routes))
    kernels.grouped_product(rows.to(DEVICE), there.to(DEVICE), None if bias is None else bias.to(DEVICE), out, moved)
    for found in (by_reference, out.cpu()):
        torch.testing.assert_close(found.double(), expected, rtol=LIMITS[dtype], atol=LIMITS[dtype])
