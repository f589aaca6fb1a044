"""Choosing tokens: warped logits plus counter-based Gumbel noise; the torch reference and the CPU path.

The token of a row is argmax(processed logits + noise(seed, position, token)), which is an exact sample of
softmax(processed logits) (the Gumbel-max trick) and depends on nothing but the row: not on the batch, the tree around
it or the device's random state. Knows nothing of requests, trees or history-dependent processors.
"""

import torch
from torch import Tensor

# Multipliers of triple32, a 32-bit finalizer of three multiply-xorshift rounds found by exhaustive search
# (Chris Wellons, "Prospecting for Hash Functions"; bias 0.0208 against an ideal of 0).
_MULTIPLIER_1 = 0xED5AD4BB
_MULTIPLIER_2 = 0xAC4C1B51
_MULTIPLIER_3 = 0x31848BAB
# Two unrelated lanes give each row a 64-bit key; the third constant separates token hashes from row keys.
_LANE_1 = 0x9E3779B9
_LANE_2 = 0x85EBCA6B
_TOKEN_LANE = 0xC2B2AE35
# Tokens looked at before a CPU row is sorted whole; a nucleus of real text is rarely larger, and a sort costs 10x more.
_WINDOW = 128


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _low_word(values: Tensor) -> Tensor:
    """Low 32 bits of int64 values as int32; the arithmetic avoids casts that are out of range."""
    return (((values & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _xor_shift_(words: Tensor, shift: int) -> Tensor:
    """words ^= words >>> shift; torch shifts int32 arithmetically, hence the mask."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _triple32_(words: Tensor) -> Tensor:
    """triple32 of int32 words in place: a bijection of 32 bits with full avalanche."""
    _xor_shift_(words, 17).mul_(_signed(_MULTIPLIER_1))
    _xor_shift_(words, 11).mul_(_signed(_MULTIPLIER_2))
    _xor_shift_(words, 15).mul_(_signed(_MULTIPLIER_3))
    return _xor_shift_(words, 14)


def _row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int32 [2, num_rows]: two words per (seed, position).

    Each lane is a bijection of the position for a given seed, so no two positions of one request share their noise.
    """
    low = _low_word(seeds)
    words = _triple32_(torch.stack((low ^ _signed(_LANE_1), low ^ _signed(_LANE_2))))
    words = _triple32_(words.bitwise_xor_((seeds >> 32).to(torch.int32)))
    return _triple32_(words.bitwise_xor_(_low_word(positions)))


def noise_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The 23 random bits behind each noise value, as int32 in [0, 2**23).

    With u32 arithmetic and triple32(x) as above:
    key_i = triple32(triple32(triple32(low(seed) ^ LANE_i) ^ high(seed)) ^ low(position)) for i in 1, 2;
    x = triple32(low(token) ^ TOKEN_LANE) ^ key_1; x = (x ^ x >> 17) * M1; x = (x ^ x >> 11) + key_2; x = x * M2;
    x = (x ^ x >> 15) * M3; bits = x >> 9. The second key enters half-way so that two rows are never the same noise
    under a permutation of tokens.

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows].
        token_ids: int64 [vocab_size].

    Returns:
        int32 [num_rows, vocab_size].
    """
    keys = _row_keys(seeds, positions)
    tokens = _triple32_(_low_word(token_ids) ^ _signed(_TOKEN_LANE))
    words = tokens[None, :] ^ keys[0][:, None]
    _xor_shift_(words, 17).mul_(_signed(_MULTIPLIER_1))
    _xor_shift_(words, 11).add_(keys[1][:, None]).mul_(_signed(_MULTIPLIER_2))
    _xor_shift_(words, 15).mul_(_signed(_MULTIPLIER_3))
    return words.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise keyed by (seed, position, token) alone.

    The uniform is (bits + 0.5) / 2**23: exact in float32 and never 0 or 1, so the noise is finite (-2.82 to 16.64).

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows]: position of the token being chosen.
        token_ids: int64 [vocab_size].

    Returns:
        float32 [num_rows, vocab_size].
    """
    uniform = noise_bits(seeds, positions, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _filter(logits: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Mask float32 logits [num_rows, vocab_size] by top-k, top-p, then min-p, with one sort; out of place."""
    vocab_size = logits.shape[-1]
    minus_inf = float("-inf")
    # Ascending, as transformers sorts: of equal logits at the edge of the nucleus the lowest ids go first.
    ranked, order = torch.sort(logits, dim=-1, stable=True)
    kth = (vocab_size - top_ks).clamp(min=0, max=vocab_size - 1)[:, None]
    below_kth = (ranked < ranked.gather(-1, kth)) & (top_ks > 0)[:, None]
    ranked.masked_fill_(below_kth, minus_inf)
    # Summed in double and rounded once: what float32 cumsum does on the CPU, and independent of a GPU's scan order.
    mass = torch.softmax(ranked, dim=-1).cumsum(dim=-1, dtype=torch.float64).to(torch.float32)
    outside = (mass <= (1.0 - top_ps.double()).to(torch.float32)[:, None]) & (top_ps < 1.0)[:, None]
    outside[:, -1] = False
    removed = torch.empty_like(outside).scatter_(-1, order, outside | below_kth)
    kept = logits.masked_fill(removed, minus_inf)
    probs = torch.softmax(kept, dim=-1)
    return kept.masked_fill_(probs < min_ps[:, None] * probs.amax(dim=-1, keepdim=True), minus_inf)


def _filter_window(logits: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> tuple[Tensor, Tensor]:
    """`_filter` by the best _WINDOW tokens of each row, and bool [num_rows]: where they were enough.

    Each filter keeps the upper end of the ranking, so where it removes the window's last token it removes the rest.
    Top-k must do so by itself, since what it keeps is what top-p measures by.
    """
    minus_inf = float("-inf")
    ranked, order = logits.topk(_WINDOW, dim=-1)
    best = ranked[:, :1]
    kth = (top_ks - 1).clamp(min=0, max=_WINDOW - 1)[:, None]
    below_kth = (ranked < ranked.gather(-1, kth)) & (top_ks > 0)[:, None]
    weights = (ranked - best).exp().masked_fill(below_kth, 0.0)
    whole = (logits - best).exp().sum(dim=-1, dtype=torch.float64)
    total = torch.where(top_ks > 0, weights.sum(dim=-1, dtype=torch.float64), whole)[:, None]
    # Mass of a token and all below it, as in `_filter`, counted from the other end.
    mass = 1.0 - (weights.cumsum(dim=-1, dtype=torch.float64) - weights) / total
    outside = (mass.float() <= (1.0 - top_ps.double()).float()[:, None]) & (top_ps < 1.0)[:, None]
    outside[:, 0] = False
    removed = below_kth | outside | (weights < min_ps[:, None])
    kept = torch.full_like(logits, minus_inf).scatter_(-1, order, ranked.masked_fill(removed, minus_inf))
    return kept, removed[:, -1] & ((top_ks == 0) | below_kth[:, -1])


def process_logits(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, *, any_filtered: bool = True
) -> Tensor:
    """Warp logits as transformers' warpers do, each row by its own parameters: temperature, top-k, top-p, min-p.

    Top-k keeps ties with the k-th logit; top-p keeps the smallest set whose mass reaches top_p, at least one token;
    min-p keeps tokens at least min_p times as probable as the best. Rows with temperature 0 are returned as they are.

    Args:
        logits: [num_rows, vocab_size], any float type; not modified.
        temperatures: float32 [num_rows], 0 or more.
        top_ks: int64 [num_rows]; 0 is off.
        top_ps: float32 [num_rows]; 1 is off.
        min_ps: float32 [num_rows]; 0 is off.
        any_filtered: False promises that no row uses top-k, top-p or min-p, which saves the sort.

    Returns:
        float32 [num_rows, vocab_size], removed tokens at -inf.
    """
    sampled = temperatures > 0
    scaled = logits.to(torch.float32) / torch.where(sampled, temperatures, 1.0)[:, None]
    if not any_filtered:
        return scaled
    filtered = sampled & ((top_ks > 0) | (top_ps < 1.0) | (min_ps > 0))
    if scaled.is_cuda:
        # Choosing rows would need their number on the host, so every row is sorted and the result picked afterwards.
        return torch.where(filtered[:, None], _filter(scaled, top_ks, top_ps, min_ps), scaled)
    rows = filtered.nonzero().squeeze(-1)
    if logits.shape[-1] > _WINDOW:
        kept, enough = _filter_window(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
        scaled[rows[enough]] = kept[enough]
        rows = rows[~enough]
    if rows.numel():
        scaled[rows] = _filter(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
    return scaled


def choose_tokens(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    any_sampled: bool,
    any_filtered: bool,
) -> Tensor:
    """The token of each row: argmax at temperature 0, else argmax(processed logits + Gumbel noise).

    A row's token does not depend on the other rows. Equal scores go to the lowest id.

    Args:
        logits: [num_rows, vocab_size], any float type.
        temperatures, top_ks, top_ps, min_ps: [num_rows], as for `process_logits`.
        seeds: int64 [num_rows].
        positions: int64 [num_rows]: position the chosen token will have.
        any_sampled: False promises that every temperature is 0.
        any_filtered: False promises that no row uses top-k, top-p or min-p.

    Returns:
        int64 [num_rows].
    """
    if not any_sampled:
        return logits.argmax(dim=-1)
    processed = process_logits(logits, temperatures, top_ks, top_ps, min_ps, any_filtered=any_filtered)
    noise = gumbel_noise(seeds, positions, torch.arange(logits.shape[-1], device=logits.device))
    return processed.add_(noise.masked_fill_((temperatures == 0)[:, None], 0.0)).argmax(dim=-1)
