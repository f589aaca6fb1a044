"""Products in which rows are alike: a row has the same bits alone, among others, and at any place among them."""

import os

import pytest
import torch

from wingbeat.kernels.alike.product import AlikeWeight

kernels = pytest.importorskip("wingbeat.kernels.alike.triton")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="needs --ptx or a GPU: numpy's products depend on a row's place"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = (1, 3, 16, 64, 200, 512)
COLUMNS, INPUTS = 136, 1096
"""Neither is a whole number of tiles, and the inputs have two splits."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def multiply(rows: torch.Tensor, weight: AlikeWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(rows), len(weight.weight)), float("nan"), device=DEVICE)
    return kernels.product(rows, weight, bias, out, False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_product_is_that_of_the_numbers(dtype, poisoned_memory):
    matrix, bias = draw(COLUMNS, INPUTS, dtype=dtype), draw(COLUMNS, dtype=dtype, seed=1)
    weight = AlikeWeight.wrap(matrix)
    assert kernels.num_splits(weight.weight.device, COLUMNS, INPUTS) == 2
    for count in (5, 70):
        rows, total = draw(count, INPUTS, dtype=dtype, seed=2), draw(count, COLUMNS, dtype=dtype, seed=3)
        expected = rows.double() @ matrix.double().t()
        torch.testing.assert_close(
            multiply(rows, weight, bias).double(), expected + bias.double(), rtol=1e-4, atol=1e-3
        )
        added = kernels.product(rows, weight, None, total.clone(), True)
        torch.testing.assert_close(added, (total.double() + expected).to(dtype), rtol=1e-2, atol=1e-2)
    assert not weight.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    weight = AlikeWeight.wrap(draw(COLUMNS, INPUTS, dtype=dtype))
    row = draw(1, INPUTS, dtype=dtype, seed=4)
    alone = multiply(row, weight).view(torch.int32)
    for count in COUNTS if dtype == torch.bfloat16 else COUNTS[:5]:
        for place in {0, count // 3, count - 1}:
            rows = draw(count, INPUTS, dtype=dtype, seed=count)
            rows[place] = row[0]
            apart = multiply(rows, weight)[place].view(torch.int32) != alone[0]
            assert not apart.any(), (count, place)
