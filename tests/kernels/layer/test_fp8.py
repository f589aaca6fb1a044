"""Products by float8 weights are as close as eight bits are."""

import pytest
import torch

from wingbeat.kernels.layer.fp8 import fp8_linear, to_fp8

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def random_weight(out_features: int, in_features: int) -> torch.Tensor:
    """Channels of very different sizes."""
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(out_features))
    return weight * torch.logspace(-1, 1, out_features)[:, None]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def test_each_channel_is_rounded_by_its_own_scale():
    weight = random_weight(9, 64)
    weight[4] = 0.0
    values, scales = to_fp8(weight)
    back = values.float() * scales[:, None]
    assert torch.equal(values.float().abs().amax(dim=1), torch.tensor([448.0] * 4 + [0.0] + [448.0] * 4))
    # Three bits behind the leading one; values far below the largest are finer than they need to be.
    assert bool(((back - weight).abs() <= weight.abs() / 16 + scales[:, None] / 512).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_product_of_the_rounded_weight(dtype):
    weight, bias = to_fp8(random_weight(11, 40)), draw(11).to(dtype)
    inputs = draw(2, 3, 40).to(dtype)
    expected = torch.nn.functional.linear(
        inputs.double(), weight.values.double() * weight.scales[:, None], bias.double()
    )
    found = fp8_linear(inputs, weight, bias)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 11))
    relative = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=1e-3)


def test_weights_that_do_not_fit_are_refused():
    weight = to_fp8(torch.ones(3, 8))
    with pytest.raises(ValueError, match=r"weight is torch.float8_e4m3fn \[3, 8\] and inputs are \[2, 7\]"):
        fp8_linear(torch.ones(2, 7), weight)
    with pytest.raises(ValueError, match=r"weight is torch.float32"):
        fp8_linear(torch.ones(2, 8), weight._replace(values=torch.ones(3, 8)))
