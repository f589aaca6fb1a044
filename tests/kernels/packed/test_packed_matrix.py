"""Unpacked weights equal the original ones, and products equal those with the unpacked weights."""

import pytest
import torch

from tests.kernels.packed.weights import KINDS, grouped_weight
from wingbeat.kernels.grouped_weight import UINT4, GroupedWeight, Scales
from wingbeat.kernels.packed.experts import Routes, experts_product
from wingbeat.kernels.packed.matrix import (
    FEW_ROWS,
    fits_step_layout,
    packed_product,
    side_by_side,
    to_step_layout,
    unpack,
)

NEAR = {"rtol": 1e-5, "atol": 1e-3}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_stay_what_they_are(kind):
    weight = grouped_weight(kind)
    matrix = to_step_layout(weight)
    assert torch.equal(matrix.dense(), weight.dense())
    assert torch.equal(matrix.select_columns(slice(5, 9)).dense(), weight.dense()[5:9])
    chosen = torch.tensor([7, 0, 7])
    if weight.order is None:
        assert torch.equal(unpack(matrix, torch.bfloat16, chosen), weight.dense()[chosen].bfloat16())


@pytest.mark.parametrize("num_rows", [3, FEW_ROWS + 1])
@pytest.mark.parametrize("kind", ["q4_k", "gptq"])
def test_products_are_those_of_the_numbers(kind, num_rows):
    weight, rows, bias = grouped_weight(kind), torch.randn(num_rows, 256), torch.randn(37)
    matrix, expected = to_step_layout(weight), rows @ weight.dense().t()
    torch.testing.assert_close(packed_product(rows, matrix), expected, **NEAR)
    torch.testing.assert_close(packed_product(rows, matrix, bias), expected + bias, **NEAR)
    total = torch.randn(num_rows, 50)
    wanted = torch.cat([total[:, :3], total[:, 3:40] + expected, total[:, 40:]], dim=1)
    packed_product(rows, matrix, out=total[:, 3:40], add=True)
    torch.testing.assert_close(total, wanted, **NEAR)


def test_products_of_half_precision_may_leave_as_float32():
    weight, rows = grouped_weight("q8_0"), torch.randn(5, 256).bfloat16()
    out = packed_product(rows, to_step_layout(weight), out=torch.empty(5, 37))
    torch.testing.assert_close(out, rows.float() @ weight.dense().bfloat16().float().t())


def test_matrices_of_one_form_lie_side_by_side():
    weights = [grouped_weight("q4_k", columns) for columns in (37, 16, 5)]
    joined = side_by_side([to_step_layout(weight) for weight in weights])
    assert torch.equal(joined.dense(), torch.cat([weight.dense() for weight in weights]))
    assert torch.equal(joined.select_columns(slice(37, 53)).dense(), weights[1].dense())
    assert joined.select_columns(slice(37, 53)).values.data_ptr() > joined.values.data_ptr()
    assert side_by_side([to_step_layout(weights[0]), to_step_layout(grouped_weight("q6_k"))]) is None
    assert side_by_side([to_step_layout(grouped_weight("gptq")) for _ in range(2)]) is None, (
        "each has an order of its own"
    )


def test_a_matrix_takes_what_its_file_takes():
    assert to_step_layout(grouped_weight("q4_0", 64)).nbytes() == 64 * 256 // 2 + 64 * 8 * 2


def test_groups_of_fewer_inputs_than_a_step_are_left():
    weight = GroupedWeight(UINT4, torch.zeros(4, 24, dtype=torch.uint8), Scales(torch.ones(4, 3)))
    assert not fits_step_layout(weight)
    assert fits_step_layout(grouped_weight("q6_k"))


@pytest.mark.parametrize(("num_rows", "choices"), [(1, 3), (7, 2), (300, 2)])
def test_each_row_meets_the_weights_of_its_experts(num_rows, choices):
    num_experts, draw = 6, torch.Generator().manual_seed(num_rows)
    weights = [grouped_weight("q4_0", 16) for _ in range(num_experts)]
    weights = [one._replace(values=one.values.roll(index, 1)) for index, one in enumerate(weights)]
    chosen = torch.rand(num_rows, num_experts - 1, generator=draw).argsort(dim=1)[:, :choices]  # nobody's is the last
    rows, routes = torch.randn(num_rows, 256, generator=draw), Routes.of(chosen, num_experts)
    matrix = side_by_side([to_step_layout(one) for one in weights])
    found = experts_product(rows, matrix, None, routes)
    dense = torch.stack([one.dense() for one in weights])
    expected = torch.einsum("ri,rkci->rkc", rows, dense[chosen]).flatten(0, 1)
    torch.testing.assert_close(found, expected, **NEAR)
    again = experts_product(
        rows.repeat_interleave(choices, 0), side_by_side([to_step_layout(one) for one in weights]), None, routes
    )
    torch.testing.assert_close(again, expected, **NEAR)
    rows_of_blocks = (routes.blocks[2] - routes.blocks[1] + 1)[routes.blocks[0] >= 0]
    assert int(rows_of_blocks.sum()) == num_rows * choices
    assert 0 < int(rows_of_blocks.min()) <= int(rows_of_blocks.max()) <= routes.height
