"""Seeded noise on a GPU, as a device function and as a launch of its own; bit-identical to the reference `noise`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.sampling import constants

_MULTIPLIER_1 = tl.constexpr(constants.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(constants.MULTIPLIER_2)
_MULTIPLIER_3 = tl.constexpr(constants.MULTIPLIER_3)
_LANE_1 = tl.constexpr(constants.LANE_1)
_LANE_2 = tl.constexpr(constants.LANE_2)
_TOKEN_LANE = tl.constexpr(constants.TOKEN_LANE)

# Tokens that a program handles at a time.
_TILE = 1024
# A fused multiply-add would round once where the reference rounds twice.
FP_FUSION = False


@triton.jit
def _triple32(word):
    word = (word ^ (word >> 17)) * _MULTIPLIER_1
    word = (word ^ (word >> 11)) * _MULTIPLIER_2
    word = (word ^ (word >> 15)) * _MULTIPLIER_3
    return word ^ (word >> 14)


@triton.jit
def row_keys(seed, position):
    """Returns the two uint32 keys of int64 (seed, position); see `noise.noise_bits`."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    key_1 = _triple32(_triple32(_triple32(low ^ _LANE_1) ^ high) ^ place)
    key_2 = _triple32(_triple32(_triple32(low ^ _LANE_2) ^ high) ^ place)
    return key_1, key_2


@triton.jit
def noise_bits(key_1, key_2, token_ids):
    word = _triple32(token_ids.to(tl.uint32) ^ _TOKEN_LANE) ^ key_1
    word = (word ^ (word >> 17)) * _MULTIPLIER_1
    word = ((word ^ (word >> 11)) + key_2) * _MULTIPLIER_2
    word = (word ^ (word >> 15)) * _MULTIPLIER_3
    return (word >> 9).to(tl.int32)


@triton.jit
def gumbel(key_1, key_2, token_ids):
    """Standard Gumbel noise for integer token ids, from a row's keys; see `noise.gumbel_noise`."""
    uniform = (noise_bits(key_1, key_2, token_ids).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise_kernel(
    seeds,
    positions,
    token_ids,
    out,
    num_tokens,
    OWN: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    row = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < num_tokens
    key_1, key_2 = row_keys(tl.load(seeds + row), tl.load(positions + row))
    first = row.to(tl.int64) * num_tokens
    ids = tl.load(token_ids + (first if OWN else 0) + at, mask=mask, other=0)
    to = out + first + at
    if BITS:
        tl.store(to, noise_bits(key_1, key_2, ids), mask=mask)
    else:
        tl.store(to, gumbel(key_1, key_2, ids), mask=mask)


def noise(seeds: Tensor, positions: Tensor, token_ids: Tensor, *, bits: bool) -> Tensor:
    """Computes `noise.noise_bits` or `noise.gumbel_noise` in one launch: int32 or float32 [num_rows, num_tokens]."""
    num_rows, num_tokens = len(seeds), token_ids.shape[-1]
    out = torch.empty(num_rows, num_tokens, dtype=torch.int32 if bits else torch.float32, device=seeds.device)
    if out.numel():
        with torch.cuda.device_of(seeds):
            _noise_kernel[(num_rows, triton.cdiv(num_tokens, _TILE))](
                seeds.contiguous(),
                positions.contiguous(),
                token_ids.contiguous(),
                out,
                num_tokens,
                OWN=token_ids.dim() == 2,
                BITS=bits,
                TILE=_TILE,
                **options(fused=FP_FUSION),
            )
    return out
