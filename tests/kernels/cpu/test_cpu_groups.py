"""Products with weights of few bits in groups equal those with the unpacked numbers, row by row."""

import pytest
import torch

from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.cpu.panels import Panels
from wingbeat.kernels.grouped_weight import E2M1, E4M3, INT8, UINT4, UINT5, UINT6, GroupedWeight, Scales

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
LARGEST = {E2M1: 15, UINT4: 15, UINT5: 31, UINT6: 63, INT8: 255}


def random_weight(form, columns, inputs, group, scaled="half") -> GroupedWeight:
    generator = torch.Generator().manual_seed(columns)
    groups = (columns, inputs // group)

    def whole(most, shape=groups):
        return torch.randint(0, most + 1, shape, dtype=torch.uint8, generator=generator)

    def floats(shape, dtype):
        return torch.randn(shape, generator=generator).mul(0.05).to(dtype)

    values = whole(126, (columns, inputs)) if form is E4M3 else whole(LARGEST[form], (columns, inputs))
    if form is E4M3:
        values |= whole(1, (columns, inputs)) << 7
    pairs = (columns, max(inputs // group // 2, 1))
    return {
        "half": lambda: GroupedWeight(form, values, Scales(floats(groups, torch.float16)), offset=-8.0),
        "bfloat": lambda: GroupedWeight(form, values, Scales(floats(groups, torch.bfloat16)), zeros=whole(15)),
        "float": lambda: GroupedWeight(form, values, Scales(floats(groups, torch.float32))),
        "minima": lambda: GroupedWeight(
            form, values, Scales(floats(groups, torch.float16)), Scales(floats(groups, torch.float16))
        ),
        "products": lambda: GroupedWeight(
            form,
            values,
            Scales(whole(63), floats(pairs, torch.float16)),
            Scales(whole(63), floats(pairs, torch.float16)),
        ),
        "signed": lambda: GroupedWeight(
            form, values, Scales(whole(255).view(torch.int8), floats(pairs, torch.float16)), offset=-32.0
        ),
    }[scaled]()


CASES = [
    *((form, "half") for form in (*LARGEST, E4M3)),
    *((UINT4, scaled) for scaled in ("bfloat", "minima", "products", "signed")),
    (E2M1, "float"),
    *((UINT5, "products"), (UINT6, "signed"), (E4M3, "float"), (E4M3, "bfloat"), (INT8, "float")),
]


@pytest.mark.few(12)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("columns", "inputs", "group"),
    [(16, 32, 16), (40, 64, 32), (129, 576, 32), (520, 256, 128), (70, 768, 128), (24, 544, 16), (24, 528, 8)],
)
@pytest.mark.parametrize(("form", "scaled"), CASES, ids=lambda one: getattr(one, "name", str(one)))
def test_a_product_is_as_exact_as_that_of_the_numbers(form, scaled, columns, inputs, group, num_threads):
    kernels, weight = cpu_kernels(), random_weight(form, columns, inputs, group, scaled)
    bias = torch.linspace(-1, 1, columns)
    panels = kernels.pack_groups(weight, bias)
    assert torch.equal(panels.dense(), weight.dense())
    plain = Panels.pack(weight.dense(), kernels.panel, None, torch.float32, bias)
    before = kernels.num_threads
    kernels.use_threads(num_threads)  # tiles of several threads begin within panels
    for num_rows in (1, 2, 3, 7, 15, 40):
        rows = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(num_rows))
        rows[:, ::19] *= 100.0  # as single channels of real models are
        found = kernels.packed_linear(rows, panels)
        alone = torch.cat([kernels.packed_linear(row[None], panels) for row in rows])
        assert torch.equal(found, alone), "a row does not depend on others"
    of_floats = kernels.packed_linear(rows, plain)
    kernels.use_threads(before)
    if inputs < 512:
        assert torch.equal(found, of_floats)
    assert error(found, rows, weight, bias) <= error(of_floats, rows, weight, bias)


def error(found, rows, weight, bias) -> float:
    """Root mean square of the difference to the product in float64."""
    exact = rows.double() @ weight.dense().double().t() + bias.double()
    return (found - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("form", [UINT4, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("size", [1e-41, 1e-30, 1.0, 127.5, 8388607.0, 1e30], ids=str)
def test_rows_of_any_size_are_multiplied_and_others_stay_out_of_numbers_that_are_not_finite(form, size):
    kernels, weight = cpu_kernels(), random_weight(form, 40, 512, 32, "minima")
    panels, rows = kernels.pack_groups(weight), torch.randn(5, 512, generator=torch.Generator().manual_seed(0)) * size
    rows[1] = 0.0
    rows[2] = size
    exact = (rows.double() @ weight.dense().double().t()).float()
    found = kernels.packed_linear(rows, panels)
    torch.testing.assert_close(found, exact, rtol=2e-6, atol=max(2e-6 * exact.abs().max().item(), 1e-36))
    rows[3, 40] = float("nan")
    rows[4, 9] = float("inf")
    odd = kernels.packed_linear(rows, panels)
    assert torch.equal(odd[:3], found[:3])
    assert not odd[3:].isfinite().any()


@pytest.mark.parametrize("form", [*LARGEST, E4M3], ids=lambda form: form.name)
def test_numbers_that_lie_input_by_input_are_packed_as_others(form):
    kernels, weight = cpu_kernels(), random_weight(form, 129, 96, 32)
    turned = weight._replace(values=weight.values.t().contiguous().t())
    assert torch.equal(kernels.pack_groups(turned).storage, kernels.pack_groups(weight).storage)


def test_inputs_in_another_order_are_multiplied_by_their_own_weights():
    kernels = cpu_kernels()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    weight = random_weight(UINT4, 40, 64, 32)._replace(order=order)
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    found = kernels.packed_linear(rows, kernels.pack_groups(weight))
    dense = weight.dense()
    assert torch.equal(dense[:, order], weight._replace(order=None).dense())
    torch.testing.assert_close(found, rows @ dense.t())


def test_columns_are_read_one_by_one_and_those_that_are_not_there_are_refused():
    kernels, weight = cpu_kernels(), random_weight(UINT5, 129, 96, 32)
    panels, columns = kernels.pack_groups(weight), torch.tensor([128, 0, 17, 17])
    assert torch.equal(panels.columns_at(columns), weight.dense()[columns])
    assert panels.columns_at(columns[:0]).shape == (0, 96)
    for wrong in (129, -1):
        with pytest.raises(IndexError, match=f"column {wrong} of 129"):
            panels.columns_at(torch.tensor([3, wrong]))


def test_rows_of_another_width_are_refused():
    kernels, weight = cpu_kernels(), random_weight(UINT4, 40, 64, 32)
    panels = kernels.pack_groups(weight)
    for multiply in (kernels.packed_linear, lambda rows, panels: kernels.packed_linears(rows, (panels, panels))):
        with pytest.raises(ValueError, match="rows have 128 elements, but the weight has 64 inputs"):
            multiply(torch.zeros(3, 128), panels)
