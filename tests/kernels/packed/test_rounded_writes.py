"""Plain weights that are rounded into a packed matrix, in its memory."""

import pytest
import torch

from tests.kernels.packed.weights import KINDS, grouped_weight
from wingbeat.kernels.packed.matrix import side_by_side, to_step_layout
from wingbeat.kernels.packed.rounding import why_not_rounded, write_rounded

STEPS = {"q4_0": 7, "q8_0": 127, "awq": 15, "gptq": 15, "int8": 127}
"""Steps between a group's zero and its largest number, or in its range."""
REFUSED = {"q4_1": "minima", "q4_k": "K-quants", "q5_0": "uint5", "q6_k": "uint6", "mxfp4": "e2m1"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_becomes_the_nearest_that_its_group_can_hold(kind: str):
    matrix = to_step_layout(grouped_weight(kind))
    if kind in REFUSED:
        assert REFUSED[kind] in why_not_rounded(matrix)
        return
    assert why_not_rounded(matrix) is None
    weight = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)) / 16
    weight[3] = 0.0
    weight[4] = 0.25  # a group of one sign
    write_rounded(matrix, weight)
    found = matrix.dense()
    ordered = weight if matrix.order is None else weight[:, matrix.order]
    groups = ordered.unflatten(1, (-1, matrix.group))
    largest = groups.abs().amax(2, keepdim=True).expand_as(groups).flatten(1)
    spread = (groups.amax(2, keepdim=True).clamp(min=0) - groups.amin(2, keepdim=True).clamp(max=0)).expand_as(groups)
    if kind == "fp8":  # three bits behind the point, or a step below the least normal number
        most = (ordered.abs() / 16).maximum(largest / 448 / 2**9)
    else:
        most = (
            (0.501 if matrix.zeros is None else 1.001)
            * (largest if matrix.zeros is None else spread.flatten(1))
            / STEPS[kind]
        )
    got = found if matrix.order is None else found[:, matrix.order]
    # scales of half precision are off by a thousandth
    assert ((got - ordered).abs() <= most + 0.005 * largest).all()
    assert not found[3].any()


def test_a_part_of_a_joined_matrix_is_written_alone_and_in_place():
    joined = side_by_side([to_step_layout(grouped_weight("awq", columns)) for columns in (16, 37)])
    before, address = joined.dense(), joined.values.data_ptr()
    part = joined.select_columns(slice(16, 53))
    weight = torch.randn(37, 256)
    write_rounded(part, weight)
    assert joined.values.data_ptr() == address
    assert torch.equal(joined.dense()[:16], before[:16])
    alone = to_step_layout(grouped_weight("awq"))
    write_rounded(alone, weight)
    assert torch.equal(joined.dense()[16:], alone.dense())


@pytest.mark.parametrize("kind", ["q8_0", "int8"])
def test_what_is_rounded_already_stays_as_it_is(kind: str):
    matrix = to_step_layout(grouped_weight(kind))
    write_rounded(matrix, torch.randn(37, 256))
    once = matrix.dense()
    write_rounded(matrix, once)
    torch.testing.assert_close(matrix.dense(), once, rtol=1e-3, atol=0)
