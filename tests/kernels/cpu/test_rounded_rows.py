"""Products of rows rounded to int8 in blocks equal the formula's, row by row."""

import pytest
import torch

from tests.kernels.cpu.test_cpu_groups import LARGEST, random_weight
from wingbeat.kernels.cpu import library
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.grouped_weight import E4M3, UINT4, UINT5, UINT6

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
BLOCK = 32
SIZES = [(16, 32, 16), (40, 48, 16), (17, 72, 24), (40, 72, 72), (129, 576, 8), (520, 256, 128)]
CASES = [
    *((form, "half") for form in LARGEST),
    *((UINT4, "minima"), (UINT4, "bfloat"), (UINT5, "products"), (UINT6, "signed")),
]


def rounded(rows):
    """Rows [num_rows, inputs] as they are multiplied, in float64: whole numbers times the scale of their block."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    top = padded.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(top > 0, 127 / top, 0)
    numbers = (padded.double() * inverse.double()).round()
    return (numbers * (top / 127).double()).flatten(1)[:, : rows.shape[1]]


def check(kernels, form, scaled, columns, inputs, group):
    weight = random_weight(form, columns, inputs, group, scaled)
    bias = torch.linspace(-1, 1, columns)
    panels = kernels.pack_groups(weight, bias)
    exact = kernels.packed_linear(torch.eye(inputs), panels) - bias
    assert panels.round_rows()
    rows = torch.randn(31, inputs, generator=torch.Generator().manual_seed(inputs)) * torch.logspace(-2, 2, 31)[:, None]
    rows[3] = 0
    expected = rounded(rows) @ weight.dense().t().double() + bias
    found = kernels.packed_linear(rows, panels)
    size = rows.abs().double() @ weight.dense().t().abs().double() + bias.abs() + 1e-6
    assert ((found - expected).abs() / size).max() < 2e-6
    assert torch.equal(found[3], bias)
    for count in (1, 2, 3, 5, 8, 12, 13, 25):
        assert torch.equal(kernels.packed_linear(rows[:count], panels), found[:count]), count
    # Rounding is exact for a row with a single non-zero number, so unit rows return the weight itself.
    again = kernels.packed_linear(torch.eye(inputs), panels) - bias
    assert (again - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.few(6)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("columns", "inputs", "group"), SIZES)
@pytest.mark.parametrize(("form", "scaled"), CASES, ids=lambda one: getattr(one, "name", str(one)))
def test_products_are_those_of_the_formula(form, scaled, columns, inputs, group, num_threads):
    kernels = cpu_kernels()
    before = kernels.num_threads
    kernels.use_threads(num_threads)
    check(kernels, form, scaled, columns, inputs, group)
    kernels.use_threads(before)


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.slow
def test_processors_that_sum_fewer_products_at_once_have_the_same(march, tmp_path, monkeypatch):
    needed = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}[march]
    if needed not in library._processor():
        pytest.skip(f"this processor has no {needed}")
    monkeypatch.setenv(library.ARCHITECTURE, march)
    kernels = CpuKernels(tmp_path)
    for form, scaled in CASES:
        check(kernels, form, scaled, 129, 576, 32)
        check(kernels, form, scaled, 40, 48, 16)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_spoils_its_own_row_alone(odd):
    kernels, weight = cpu_kernels(), random_weight(UINT4, 40, 64, 32)
    panels = kernels.pack_groups(weight)
    assert panels.round_rows()
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    before = kernels.packed_linear(rows, panels)
    rows[2, 5] = odd
    found = kernels.packed_linear(rows, panels)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], before[[0, 1, 3]])


def test_floats_of_eight_bits_round_no_rows():
    kernels, weight = cpu_kernels(), random_weight(E4M3, 40, 64, 32)
    panels, rows = kernels.pack_groups(weight), torch.randn(3, 64)
    before = kernels.packed_linear(rows, panels)
    assert not panels.round_rows()
    assert torch.equal(kernels.packed_linear(rows, panels), before)


def test_inputs_in_another_order_are_rounded_in_that_order():
    kernels, order = cpu_kernels(), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    weight = random_weight(UINT4, 40, 64, 32)._replace(order=order)
    panels, rows = kernels.pack_groups(weight), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert panels.round_rows()
    expected = rounded(rows[:, order]) @ weight._replace(order=None).dense().t().double()
    torch.testing.assert_close(kernels.packed_linear(rows, panels).double(), expected, rtol=1e-5, atol=1e-5)
