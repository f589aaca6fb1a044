"""Products by weights of few bits in groups: those of the numbers that they stand for, row by row alike."""

import pytest
import torch

from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.layer.grouped_weight import GROUP, GroupedWeight

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
ROUNDING = 1e-5
"""Of float32 sums, by their spread."""


def random_weight(form: str, columns: int, inputs: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(columns)
    groups = (columns, inputs // GROUP)
    scales = torch.rand(groups, generator=generator).mul(0.01).half()
    if form == "bytes":
        values = torch.randint(-127, 128, (columns, inputs), dtype=torch.int8, generator=generator)
        return GroupedWeight(values, scales)
    values = torch.randint(0, 16, (columns, inputs), dtype=torch.uint8, generator=generator)
    minima = torch.randn(groups, generator=generator).mul(0.05).half()
    return GroupedWeight(values, scales, offset=-8.0) if form == "middle" else GroupedWeight(values, scales, minima)


@pytest.mark.few(6)
@pytest.mark.parametrize("num_rows", [1, 3, 6, 7, 16, 40])
@pytest.mark.parametrize(("columns", "inputs"), [(16, 32), (40, 64), (129, 576)])
@pytest.mark.parametrize("form", ["bytes", "middle", "minima"])
def test_a_product_is_that_of_the_numbers_and_of_each_row_alone(form, columns, inputs, num_rows):
    kernels, weight = cpu_kernels(), random_weight(form, columns, inputs)
    bias = torch.linspace(-1, 1, columns)
    panels = GroupPanels.pack(weight, kernels.panel, bias=bias)
    assert torch.equal(panels.dense(), weight.dense())
    rows = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1))
    found = kernels.packed_linear(rows, panels)
    exact = rows.double() @ weight.dense().double().t()
    assert float((found - bias - exact).abs().max() / exact.std()) < ROUNDING
    alone = torch.cat([kernels.packed_linear(row[None], panels) for row in rows])
    assert torch.equal(alone, found)
