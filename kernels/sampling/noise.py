"""Counter-based noise, a function of (seed, position, token) alone: torch reference and CPU path.

CUDA tensors use the kernel of `kernels.gpu.sampling.noise`, which returns the same bits.
"""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.sampling import constants


def _signed(word: int) -> int:
    """Converts a 32-bit word to the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


_MULTIPLIER_1, _MULTIPLIER_2 = _signed(constants.MULTIPLIER_1), _signed(constants.MULTIPLIER_2)
_MULTIPLIER_3, _TOKEN_LANE = _signed(constants.MULTIPLIER_3), _signed(constants.TOKEN_LANE)
_LANE_1, _LANE_2 = _signed(constants.LANE_1), _signed(constants.LANE_2)


def _low_word(values: Tensor) -> Tensor:
    """Low 32 bits of int64 values as int32; the arithmetic avoids casts that are out of range."""
    return (((values & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _xor_shift_(words: Tensor, shift: int) -> Tensor:
    """words ^= words >>> shift; torch's shift of int32 copies the sign bit, which the mask removes."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _triple32_(words: Tensor) -> Tensor:
    """triple32 of int32 words in place: a bijection of 32 bits with full avalanche."""
    _xor_shift_(words, 17).mul_(_MULTIPLIER_1)
    _xor_shift_(words, 11).mul_(_MULTIPLIER_2)
    _xor_shift_(words, 15).mul_(_MULTIPLIER_3)
    return _xor_shift_(words, 14)


def _row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int32 [2, num_rows]: two key words per (seed, position).

    For a given seed each lane is a bijection of the position, so no two positions of a request share their noise.
    """
    low = _low_word(seeds)
    words = _triple32_(torch.stack((low ^ _LANE_1, low ^ _LANE_2)))
    words = _triple32_(words.bitwise_xor_((seeds >> 32).to(torch.int32)))
    return _triple32_(words.bitwise_xor_(_low_word(positions)))


def noise_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The 23 random bits from which each noise value is computed, as int32 in [0, 2**23).

    With u32 arithmetic and triple32(x) as above: key_i = triple32(triple32(triple32(low(seed) ^ LANE_i) ^ high(seed)) ^
    low(position)) for i in 1, 2; x = triple32(low(token) ^ TOKEN_LANE) ^ key_1; x = (x ^ x >> 17) * M1; x = (x ^ x >>
    11) + key_2; x = x * M2; x = (x ^ x >> 15) * M3; bits = x >> 9. The second key is added half-way, because otherwise
    one row's noise could equal another row's noise with the tokens permuted.

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows].
        token_ids: int64 [vocab_size], or [num_rows, num_tokens] for different tokens per row.

    Returns:
        int32 [num_rows, vocab_size or num_tokens].
    """
    if kernels := choice.compiled("noise", seeds):
        return kernels.noise(seeds, positions, token_ids, bits=True)
    keys = _row_keys(seeds, positions)
    tokens = _triple32_(_low_word(token_ids) ^ _TOKEN_LANE)
    words = tokens ^ keys[0][:, None]
    _xor_shift_(words, 17).mul_(_MULTIPLIER_1)
    _xor_shift_(words, 11).add_(keys[1][:, None]).mul_(_MULTIPLIER_2)
    _xor_shift_(words, 15).mul_(_MULTIPLIER_3)
    return words.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, a function of (seed, position, token) alone.

    The uniform number is (bits + 0.5) / 2**23: exact in float32 and never 0 or 1, so the noise is finite (-2.82 to
    16.64).

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows]: position of the token being chosen.
        token_ids: int64 [vocab_size], or [num_rows, num_tokens] for different tokens per row.

    Returns:
        float32 [num_rows, vocab_size or num_tokens].
    """
    if kernels := choice.compiled("noise", seeds):
        return kernels.noise(seeds, positions, token_ids, bits=False)
    uniform = noise_bits(seeds, positions, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
