"""The noise kernel has the reference's bits."""

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels.gpu.sampling import noise as triton_noise
from wingbeat.kernels.sampling import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_noise_has_the_references_bits():
    seeds = torch.tensor([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    positions = torch.tensor([0, 1, 2**31 - 1, 5, 131071, 7, 42])
    tokens = torch.cat([torch.arange(61), torch.tensor([31999, 151935, 2**31 - 1])])
    keys = [tensor.to(DEVICE) for tensor in (seeds, positions, tokens)]
    assert torch.equal(triton_noise.noise(*keys, bits=True).cpu(), noise.noise_bits(seeds, positions, tokens))
    torch.testing.assert_close(
        triton_noise.noise(*keys, bits=False).cpu(),
        noise.gumbel_noise(seeds, positions, tokens),
        rtol=3e-7,
        atol=3e-7,
    )


def test_rows_with_tokens_of_their_own_have_the_references_bits():
    seeds, positions = torch.tensor([5, -1, 2**40]), torch.tensor([0, 9, 131071])
    tokens = torch.randint(0, 151936, (3, 41), generator=torch.Generator().manual_seed(0))
    keys = [tensor.to(DEVICE) for tensor in (seeds, positions, tokens)]
    assert torch.equal(triton_noise.noise(*keys, bits=True).cpu(), noise.noise_bits(seeds, positions, tokens))


def test_no_keys_need_no_launch():
    none = torch.arange(0, device=DEVICE)
    assert triton_noise.noise(none, none, none, bits=False).shape == (0, 0)
