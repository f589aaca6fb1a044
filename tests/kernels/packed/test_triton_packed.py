"""Products by packed weights: the kernels against their references."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.packed.weights import KINDS, grouped_weight
from wingbeat.kernels.packed import triton as triton_packed
from wingbeat.kernels.packed.experts import Routes, experts_product
from wingbeat.kernels.packed.matrix import packed_product, side_by_side, to_step_layout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def product(kind, num_rows, bias=None, add=False, dtype=torch.float32, inputs=256):
    """The kernel's and the reference's."""
    matrix = to_step_layout(grouped_weight(kind, inputs=inputs))
    rows = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(7)).to(dtype)
    rows = rows if matrix.order is None else rows[:, matrix.order].contiguous()
    matrix = matrix._replace(order=None)
    out = torch.linspace(-1, 1, num_rows * 50).view(num_rows, 50).to(dtype)
    expected = out.clone()
    packed_product(rows, matrix, bias, expected[:, 4:41], add)
    found, moved = out.to(DEVICE), matrix.to(DEVICE)
    there = None if bias is None else bias.to(DEVICE)
    for _ in range(1 if add else 2):  # counters are zeros behind each product
        triton_packed.packed_product(rows.to(DEVICE), moved, there, found[:, 4:41], add)
    assert not moved.counters.any()
    return found.cpu(), expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_its_reference(kind):
    torch.testing.assert_close(*product(kind, 3), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_rows", [0, 1, 18, 64])
def test_rows_of_any_number(num_rows):
    found, expected = product("q4_k", num_rows, torch.arange(37.0), add=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_the_rows_dtype(request, dtype):
    if dtype == torch.bfloat16 and DEVICE.type == "cpu" and request.config.getoption("--ptx") is None:
        pytest.skip("needs --ptx: the interpreter multiplies no bfloat16")
    found, expected = product("q4_1", 5, torch.arange(37.0), dtype=dtype)
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=0.1)


@pytest.mark.parametrize(("kind", "inputs"), [("q4_0", 96), ("q4_0", 2048), ("q8_0", 2048)])
def test_programs_that_share_a_tile_and_a_half_step_too_many(kind, inputs):
    torch.testing.assert_close(*product(kind, 2, inputs=inputs), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_numbers_are_those_of_the_file(request, kind, dtype):
    if DEVICE.type == "cpu" and request.config.getoption("--ptx") is None:
        dtype = {torch.bfloat16: torch.float16}.get(dtype, dtype)  # which the interpreter cuts off
    weight = grouped_weight(kind)
    matrix, dense = to_step_layout(weight)._replace(order=None).to(DEVICE), weight._replace(order=None).dense()
    assert torch.equal(triton_packed.unpack(matrix, dtype).cpu(), dense.to(dtype))
    chosen = torch.tensor([36, 0, 36, 12])
    assert torch.equal(triton_packed.unpack(matrix, dtype, chosen.to(DEVICE)).cpu(), dense[chosen].to(dtype))


@pytest.mark.parametrize("kind", ["q4_k", "mxfp4", "q8_0"])
@pytest.mark.parametrize(("num_rows", "has_bias"), [(1, False), (9, True), (60, False)])
def test_products_of_experts_are_their_reference(kind, num_rows, has_bias):
    num_experts, choices, draw = 5, 2, torch.Generator().manual_seed(num_rows)
    matrix = side_by_side([to_step_layout(grouped_weight(kind, 37)) for _ in range(num_experts)])
    rows = torch.randn(num_rows, 256, generator=draw)
    chosen = torch.rand(num_rows, num_experts, generator=draw).argsort(dim=1)[:, :choices].clamp(max=3)
    routes, bias = Routes.of(chosen, num_experts), torch.arange(37.0 * num_experts) if has_bias else None
    expected = experts_product(rows, matrix, bias, routes)
    out = torch.full_like(expected, torch.nan).to(DEVICE)
    moved = Routes(routes.order.to(DEVICE), routes.blocks.to(DEVICE), *routes[2:])
    bias = None if bias is None else bias.to(DEVICE)
    triton_packed.experts_product(rows.to(DEVICE), matrix.to(DEVICE), bias, out, moved)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-3)
