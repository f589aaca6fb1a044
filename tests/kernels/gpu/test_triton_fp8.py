"""Products by weights of eight bits: the kernel against its reference."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.layer.test_fp8 import draw, random_weight
from wingbeat.kernels.gpu import fp8 as fp8_triton
from wingbeat.kernels.layer.fp8 import fp8_linear, to_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("num_rows", [0, 1, 18])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_kernel_is_the_reference(num_rows, has_bias):
    weight = to_fp8(random_weight(45, 150))
    inputs = draw(num_rows, 150)
    bias = torch.arange(45.0) if has_bias else None
    moved = (part.to(DEVICE) for part in weight)
    found = fp8_triton.fp8_linear(inputs.to(DEVICE), *moved, None if bias is None else bias.to(DEVICE)).cpu()
    torch.testing.assert_close(found, fp8_linear(inputs, weight, bias), rtol=1e-4, atol=1e-3)
