"""Noise is the documented integers, depends on its key alone, and is as good as independent uniform draws."""

import math

import pytest
import torch

from tests.kernels.chi_square import CHI2_LIMIT, chi_square
from wingbeat.kernels.sampling.noise import gumbel_noise, noise_bits

WORD = 0xFFFFFFFF


def triple32(word: int) -> int:
    for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        word = ((word ^ word >> shift) * multiplier) & WORD
    return word ^ word >> 14


def bits_of(seed: int, position: int, token: int) -> int:
    """The documented recipe in unbounded integers."""
    low, high = seed & WORD, seed >> 32 & WORD
    keys = [triple32(triple32(triple32(low ^ lane) ^ high) ^ position & WORD) for lane in (0x9E3779B9, 0x85EBCA6B)]
    word = triple32(token & WORD ^ 0xC2B2AE35) ^ keys[0]
    word = ((word ^ word >> 17) * 0xED5AD4BB) & WORD
    word = (((word ^ word >> 11) + keys[1]) * 0xAC4C1B51) & WORD
    word = ((word ^ word >> 15) * 0x31848BAB) & WORD
    return word >> 9


def test_noise_bits_are_the_documented_integers():
    seeds = torch.tensor([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    positions = torch.tensor([0, 1, 2**31 - 1, 5, 131071, 7, 42])
    tokens = torch.tensor([0, 1, 2, 31999, 151935, 2**31 - 1])
    expected = [
        [bits_of(s, p, t) for t in tokens.tolist()] for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert noise_bits(seeds, positions, tokens).tolist() == expected


def test_noise_depends_on_its_key_only():
    seeds, positions = torch.arange(9) * 17, torch.arange(9) + 3
    whole = gumbel_noise(seeds, positions, torch.arange(1003))
    for row in range(9):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], torch.arange(501, 1003))
        assert torch.equal(alone[0], whole[row, 501:])


def test_rows_may_have_tokens_of_their_own():
    seeds, positions = torch.tensor([3, -8]), torch.tensor([11, 40])
    token_ids = torch.tensor([[5, 90, 7], [2, 5, 61]])
    every = gumbel_noise(seeds, positions, torch.arange(100))
    assert torch.equal(gumbel_noise(seeds, positions, token_ids), every.gather(1, token_ids))


def test_noise_is_finite_and_gumbel():
    noise = gumbel_noise(torch.arange(64), torch.arange(64), torch.arange(4096)).double().flatten()
    assert torch.isfinite(noise).all()
    # Standard Gumbel: mean 0.5772, variance pi^2 / 6; over 262,144 draws the errors of both stay below 6 sigma.
    assert abs(noise.mean() - 0.57722) < 6 * math.sqrt(math.pi**2 / 6 / noise.numel())
    assert abs(noise.var() - math.pi**2 / 6) < 6 * math.sqrt((4.4 * (math.pi**2 / 6) ** 2) / noise.numel())


def neighbours(axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits at 262,144 keys, and at the same keys moved by one along an axis."""
    seeds, positions, tokens = torch.arange(64), torch.arange(64) + 100, torch.arange(4096)
    moved = {"seed": seeds, "position": positions, "token": tokens}
    before = noise_bits(seeds, positions, tokens)
    moved[axis] = moved[axis] + 1
    return before.flatten(), noise_bits(moved["seed"], moved["position"], moved["token"]).flatten()


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_neighbouring_keys_are_independent(axis):
    before, after = neighbours(axis)
    # Joint distribution of the top 4 bits on each side: 256 equally likely cells, 1024 draws each.
    counts = torch.bincount((before >> 19) * 16 + (after >> 19), minlength=256)
    assert chi_square(counts, torch.full((256,), before.numel() / 256)) < CHI2_LIMIT[255]
    # Every bit flips half the time: 0.5 +- 6 sigma over the draws.
    for bit in range(23):
        flips = ((before ^ after) >> bit & 1).double().mean()
        assert abs(flips - 0.5) < 6 * 0.5 / math.sqrt(before.numel())


@pytest.mark.parametrize("varying", ["seeds", "positions"])
def test_small_consecutive_keys_give_uniform_bits(varying):
    count, still = torch.arange(65536), torch.zeros(65536, dtype=torch.int64)
    seeds, positions = (count, still) if varying == "seeds" else (still, count)
    bits = noise_bits(seeds, positions, torch.tensor([0, 1]))
    for column in range(2):
        for shift in (17, 8, 0):
            counts = torch.bincount(bits[:, column] >> shift & 63, minlength=64)
            assert chi_square(counts, torch.full((64,), 1024.0)) < CHI2_LIMIT[63]
    # Two tokens of one row: joint distribution over 256 cells.
    counts = torch.bincount((bits[:, 0] >> 19) * 16 + (bits[:, 1] >> 19), minlength=256)
    assert chi_square(counts, torch.full((256,), 256.0)) < CHI2_LIMIT[255]
