"""Choosing tokens on a GPU: the kernels behind `sampling`, which is their reference.

Rows whose token is an argmax of logits, or of logits plus noise, take one pass over the vocabulary. Filtered rows are
kept in float32 and searched for the edges of top-k and top-p, digit by digit of the float's bits, without a sort: each
launch bins the tokens that still match the digits found so far, and the next one reads the bins. Every row is shared by
as many programs as fill the device. Counts and masses are integers, so no sum depends on their number or order, and a
row gets the same token in any batch. Launches depend on shapes and flags alone.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels import sampling
from wingbeat.kernels.sampling import LogitProcessors, check_processors

_MULTIPLIER_1 = tl.constexpr(sampling._MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(sampling._MULTIPLIER_2)
_MULTIPLIER_3 = tl.constexpr(sampling._MULTIPLIER_3)
_LANE_1 = tl.constexpr(sampling._LANE_1)
_LANE_2 = tl.constexpr(sampling._LANE_2)
_TOKEN_LANE = tl.constexpr(sampling._TOKEN_LANE)

# A float's 32 bits are searched in 8 digits of 4; 16 bins are what a program can hold in registers for each lane.
_DIGIT_BITS = tl.constexpr(4)
_NUM_BINS = tl.constexpr(16)
_NUM_DIGITS = tl.constexpr(8)
_NO_TOKEN = tl.constexpr(2**31 - 1)

# Tokens a program handles at a time, for one value and for _NUM_BINS values per token; both divide a program's share.
_TILE = 1024
_SEARCH_TILE = 512
# Programs that fill a large GPU twice, and the most that share a row (each reads what all of them found).
_NUM_PROGRAMS = 264
_MAX_SPLITS = 128
# A fused multiply-add would round once where the reference rounds twice.
_FP_FUSION = False


class SamplingWorkspace:
    """Memory of `choose_tokens` at addresses that never change. Holds nothing between calls.

    Args:
        max_rows: most rows of a call, at least 1.
        vocab_size: columns of the logits.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str, *, scaled: bool = True) -> None:
        if max_rows < 1 or vocab_size < 1:
            raise ValueError(f"max_rows is {max_rows} and vocab_size is {vocab_size}: both must be at least 1")
        self.max_rows, self.vocab_size = max_rows, vocab_size
        shares = max(max_rows, _NUM_PROGRAMS)
        searched = shares if scaled else 0
        self.scaled = torch.empty(max_rows if scaled else 0, vocab_size, dtype=torch.float32, device=device)
        """Logits over temperature of filtered rows."""
        self.maxima = torch.empty(shares, dtype=torch.float32, device=device)
        self.best_scores = torch.empty(shares, dtype=torch.float32, device=device)
        self.best_ids = torch.empty(shares, dtype=torch.int32, device=device)
        self.bins = torch.empty(2, _NUM_DIGITS.value, searched, _NUM_BINS.value, dtype=torch.int64, device=device)
        """[search, digit, share of a row, bin]: tokens (search 0) or mass (search 1)."""
        self.states = torch.empty(2, _NUM_DIGITS.value, max_rows, 3, dtype=torch.int64, device=device)
        """[search, digit, row, field]: what was known before the digit was searched."""


class _Shares(NamedTuple):
    """How the programs share a row."""

    num_splits: int
    length: int
    """Tokens of one program, a multiple of both tiles."""


def _share(num_rows: int, vocab_size: int) -> _Shares:
    num_tiles = triton.cdiv(vocab_size, _TILE)
    splits = min(num_tiles, max(_NUM_PROGRAMS // num_rows, 1), _MAX_SPLITS)
    tiles = triton.cdiv(num_tiles, splits)
    return _Shares(triton.cdiv(num_tiles, tiles), tiles * _TILE)


def device_of(tensor: Tensor) -> AbstractContextManager:
    """Makes a tensor's GPU the one kernels are launched on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def _triple32(word):
    word = (word ^ (word >> 17)) * _MULTIPLIER_1
    word = (word ^ (word >> 11)) * _MULTIPLIER_2
    word = (word ^ (word >> 15)) * _MULTIPLIER_3
    return word ^ (word >> 14)


@triton.jit
def row_keys(seed, position):
    """The two uint32 keys of (seed, position), int64 each; see `sampling.noise_bits`."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    key_1 = _triple32(_triple32(_triple32(low ^ _LANE_1) ^ high) ^ place)
    key_2 = _triple32(_triple32(_triple32(low ^ _LANE_2) ^ high) ^ place)
    return key_1, key_2


@triton.jit
def _noise_bits(key_1, key_2, token_ids):
    word = _triple32(token_ids.to(tl.uint32) ^ _TOKEN_LANE) ^ key_1
    word = (word ^ (word >> 17)) * _MULTIPLIER_1
    word = ((word ^ (word >> 11)) + key_2) * _MULTIPLIER_2
    word = (word ^ (word >> 15)) * _MULTIPLIER_3
    return (word >> 9).to(tl.int32)


@triton.jit
def gumbel(key_1, key_2, token_ids):
    """Standard Gumbel noise of a row's keys at integer token ids; see `sampling.gumbel_noise`."""
    uniform = (_noise_bits(key_1, key_2, token_ids).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise_kernel(seeds, positions, token_ids, out, num_tokens, BITS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < num_tokens
    key_1, key_2 = row_keys(tl.load(seeds + row), tl.load(positions + row))
    ids = tl.load(token_ids + at, mask=mask, other=0)
    to = out + row.to(tl.int64) * num_tokens + at
    if BITS:
        tl.store(to, _noise_bits(key_1, key_2, ids), mask=mask)
    else:
        tl.store(to, gumbel(key_1, key_2, ids), mask=mask)


def noise(seeds: Tensor, positions: Tensor, token_ids: Tensor, *, bits: bool) -> Tensor:
    """`sampling.noise_bits` or `sampling.gumbel_noise` in one launch: int32 or float32 [num_rows, num_tokens]."""
    num_rows, num_tokens = len(seeds), len(token_ids)
    out = torch.empty(num_rows, num_tokens, dtype=torch.int32 if bits else torch.float32, device=seeds.device)
    if out.numel():
        with device_of(seeds):
            _noise_kernel[(num_rows, triton.cdiv(num_tokens, _TILE))](
                seeds.contiguous(),
                positions.contiguous(),
                token_ids.contiguous(),
                out,
                num_tokens,
                BITS=bits,
                TILE=_TILE,
                enable_fp_fusion=_FP_FUSION,
            )
    return out


@triton.jit
def sortable(values):
    """uint32 in the order of the floats; -0 has been made 0."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _unsortable(keys):
    """The floats of `sortable` keys."""
    bits = (keys ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(values, largest):
    """Probability relative to the largest."""
    return tl.exp(values - largest)


@triton.jit
def _mass(weights, SCALE: tl.constexpr):
    """Weights 0..1 as fixed-point int64. A token's error is below 2**-44, that of 2**18 of them below 2**-26."""
    return (weights * SCALE + 0.5).to(tl.int64)


@triton.jit
def _largest(maxima, row, num_splits, SPLITS: tl.constexpr):
    """Largest value of a row, 0 where all are -inf so that differences from it are numbers."""
    at = tl.arange(0, SPLITS)
    shares = tl.load(maxima + row * num_splits + at, mask=at < num_splits, other=float("-inf"))
    largest = tl.max(shares, axis=0)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _is_filtered(temperature, top_k, top_p, min_p):
    return (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0))


@triton.jit
def _keep_best(best_scores, best_ids, scores, ids):
    """Lane by lane; an earlier id stays where scores are equal."""
    better = scores > best_scores
    return tl.where(better, scores, best_scores), tl.where(better, ids, best_ids)


@triton.jit
def _first_best(scores, ids):
    """The highest score and its lowest id."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, _NO_TOKEN), axis=0)


@triton.jit
def _scale_kernel(
    logits,
    logits_stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    repetitions,
    presences,
    frequencies,
    history_slots,
    prompt_mask,
    output_counts,
    path_token_ids,
    path_length,
    bias_table,
    bias_rows,
    grammar_mask,
    grammar_stride,
    scaled,
    maxima,
    best_scores,
    best_ids,
    vocab_size,
    length,
    num_splits,
    ANY_FILTERED: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_PATH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GRAMMAR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Processors and temperature. Rows that are not filtered get their best score; filtered ones are stored."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    sampled = temperature > 0
    divisor = tl.where(sampled, temperature, 1.0)
    filtered = False
    noisy = sampled
    if ANY_FILTERED:
        filtered = _is_filtered(temperature, tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row))
        noisy = sampled & (filtered == 0)
    stored = filtered
    if KEEP_ALL:
        stored = True
    key_1, key_2 = row_keys(tl.load(seeds + row), tl.load(positions + row))
    history = -1
    repetition = 1.0
    presence = 0.0
    frequency = 0.0
    if HAS_PENALTIES:
        history = tl.load(history_slots + row)
        repetition = tl.load(repetitions + row)
        presence = tl.load(presences + row)
        frequency = tl.load(frequencies + row)
    bias_row = -1
    if HAS_BIAS:
        bias_row = tl.load(bias_rows + row)
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), dtype=tl.float32)
    best_at = tl.full([TILE], 2147483647, dtype=tl.int32)
    largest = tl.full([TILE], float("-inf"), dtype=tl.float32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(logits + row * logits_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
        # One condition is the compiler's, the other the row's.
        if HAS_BIAS:  # noqa: SIM102
            if bias_row >= 0:
                values += tl.load(bias_table + bias_row * vocab_size + ids, mask=mask, other=0.0)
        if HAS_PENALTIES:  # noqa: SIM102
            if (history >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)):
                counts = tl.load(output_counts + history * vocab_size + ids, mask=mask, other=0)
                if HAS_PATH:
                    for step in range(path_length):
                        token = tl.load(path_token_ids + row * path_length + step)
                        counts += (ids == token).to(tl.int32)
                prompted = tl.load(prompt_mask + history * vocab_size + ids, mask=mask, other=0)
                repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
                values = tl.where((prompted != 0) | (counts > 0), repeated, values)
                values = values - frequency * counts.to(tl.float32)
                values = values - presence * (counts > 0).to(tl.float32)
        if HAS_GRAMMAR:
            words = tl.load(grammar_mask + row * grammar_stride + (ids >> 5), mask=mask, other=0)
            values = tl.where(((words >> (ids & 31)) & 1) != 0, values, float("-inf"))
        values = tl.div_rn(values, divisor)
        # The search compares bits, in which -0 and 0 differ.
        values = tl.where(values == 0, 0.0, values)
        if stored:
            tl.store(scaled + row * vocab_size + ids, values, mask=mask)
        largest = tl.maximum(largest, tl.where(mask, values, float("-inf")))
        scores = values
        if noisy:
            scores = values + gumbel(key_1, key_2, ids)
        best, best_at = _keep_best(best, best_at, tl.where(mask, scores, float("-inf")), ids)
    share = row * num_splits + split
    tl.store(maxima + share, tl.max(largest, axis=0))
    score, token = _first_best(best, best_at)
    tl.store(best_scores + share, score)
    tl.store(best_ids + share, token)


@triton.jit
def _merged_bins(bins, search: tl.constexpr, digit, row, num_rows, num_splits, SPLITS: tl.constexpr):
    """int64 [_NUM_BINS]: a digit's bins of a row over the programs that share it."""
    at = tl.arange(0, SPLITS)[:, None]
    first = ((search * _NUM_DIGITS + digit) * num_rows + row) * num_splits
    shares = tl.load(bins + (first + at) * _NUM_BINS + tl.arange(0, _NUM_BINS)[None, :], mask=at < num_splits, other=0)
    return tl.sum(shares, axis=0)


@triton.jit
def _find_kth(bins, states, digit, top_k, row, num_rows, num_splits, vocab_size, SPLITS: tl.constexpr):
    """Digits above `digit` of the k-th largest key, and its rank from the top among the keys that share them."""
    prefix = tl.full([], 0, dtype=tl.int64)
    rank = tl.minimum(top_k, vocab_size).to(tl.int64)
    if digit > 0:
        state = states + ((digit - 1) * num_rows + row) * 3
        # Before the first digit the state is what it is above.
        prefix = tl.load(state, mask=digit > 1, other=0)
        rank = tl.where(digit > 1, tl.load(state + 1, mask=digit > 1, other=0), rank)
        counts = _merged_bins(bins, 0, digit - 1, row, num_rows, num_splits, SPLITS)
        places = tl.arange(0, _NUM_BINS)
        not_below = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        found = tl.sum((not_below >= rank).to(tl.int64), axis=0) - 1
        rank -= tl.sum(tl.where(places > found, counts, 0), axis=0)
        prefix = prefix * _NUM_BINS + found
    return prefix, rank


@triton.jit
def _outside(mass, total, limit):
    """Whether a token with this mass, counted from below and itself included, is removed by top-p."""
    return (mass < total) & ((mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32) <= limit)


@triton.jit
def _nucleus_limit(top_p):
    return (1.0 - top_p.to(tl.float64)).to(tl.float32)


@triton.jit
def _find_nucleus(bins, states, digit, top_p, row, num_rows, num_splits, SPLITS: tl.constexpr):
    """Digits above `digit` of the lowest key top-p keeps, the mass below the keys that share them, and all mass."""
    prefix = tl.full([], 0, dtype=tl.int64)
    below = tl.full([], 0, dtype=tl.int64)
    total = tl.full([], 0, dtype=tl.int64)
    if digit > 0:
        state = states + ((_NUM_DIGITS + digit - 1) * num_rows + row) * 3
        prefix = tl.load(state, mask=digit > 1, other=0)
        below = tl.load(state + 1, mask=digit > 1, other=0)
        masses = _merged_bins(bins, 1, digit - 1, row, num_rows, num_splits, SPLITS)
        # Every kept token is in a bin of the first digit.
        total = tl.where(digit > 1, tl.load(state + 2, mask=digit > 1, other=0), tl.sum(masses, axis=0))
        places = tl.arange(0, _NUM_BINS)
        cumulative = below + tl.cumsum(masses, axis=0)
        found = tl.sum(_outside(cumulative, total, _nucleus_limit(top_p)).to(tl.int64), axis=0)
        below += tl.sum(tl.where(places < found, masses, 0), axis=0)
        prefix = prefix * _NUM_BINS + found
    return prefix, below, total


@triton.jit(do_not_specialize=["digit"])
def _search_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    bins,
    states,
    vocab_size,
    length,
    num_splits,
    digit,
    MASS: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Bin one digit of the keys whose higher digits are the edge's: how many (top-k), or their mass (top-p)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_rows = tl.num_programs(0)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    if MASS:
        if (temperature <= 0) | (top_p >= 1.0):
            return
    elif (temperature <= 0) | (top_k <= 0):
        return
    floor = tl.full([], 0, dtype=tl.int64)
    largest = 0.0
    if MASS:
        largest = _largest(maxima, row, num_splits, SPLITS)
        if top_k > 0:
            floor, _ = _find_kth(bins, states, _NUM_DIGITS, top_k, row, num_rows, num_splits, vocab_size, SPLITS)
        prefix, below, total = _find_nucleus(bins, states, digit, top_p, row, num_rows, num_splits, SPLITS)
    else:
        prefix, below = _find_kth(bins, states, digit, top_k, row, num_rows, num_splits, vocab_size, SPLITS)
        total = prefix
    if split == 0:
        state = states + ((MASS * _NUM_DIGITS + digit) * num_rows + row) * 3
        tl.store(state, prefix)
        tl.store(state + 1, below)
        tl.store(state + 2, total)
    lowest = floor.to(tl.uint32)
    wanted = prefix.to(tl.uint32)
    shift = (_NUM_DIGITS - 1 - digit) * _DIGIT_BITS
    lanes = tl.arange(0, TILE)
    places = tl.arange(0, _NUM_BINS)[:, None]
    if MASS:
        found = tl.zeros([_NUM_BINS, TILE], dtype=tl.int64)
    else:
        found = tl.zeros([_NUM_BINS, TILE], dtype=tl.int32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
        keys = sortable(values)
        digits = keys >> shift
        # Two shifts, since one by all 32 bits is not defined.
        matching = mask & ((digits >> _DIGIT_BITS) == wanted)
        if MASS:
            matching = matching & (keys >= lowest)
        # After a few digits most tiles hold nothing that matches.
        if tl.max(matching.to(tl.int32), axis=0) > 0:
            here = ((digits & (_NUM_BINS - 1)).to(tl.int32)[None, :] == places) & matching[None, :]
            if MASS:
                found += tl.where(here, _mass(_weight(values, largest), SCALE)[None, :], 0)
            else:
                found += here.to(tl.int32)
    first = (((MASS * _NUM_DIGITS + digit) * num_rows + row) * num_splits + split) * _NUM_BINS
    tl.store(bins + first + tl.arange(0, _NUM_BINS), tl.sum(found, axis=1).to(tl.int64))


@triton.jit
def _filter_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    bins,
    states,
    best_scores,
    best_ids,
    vocab_size,
    length,
    num_splits,
    CHOOSE: tl.constexpr,
    SCALE: tl.constexpr,
    ID_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best score among the tokens a filtered row keeps; without CHOOSE the others are set to -inf instead."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_rows = tl.num_programs(0)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    if _is_filtered(tl.load(temperatures + row), top_k, top_p, min_p) == 0:
        return
    largest = _largest(maxima, row, num_splits, SPLITS)
    floor = tl.full([], 0, dtype=tl.int64)
    # Of the keys equal to the floor, top-p removes the lowest `num_removed` ids.
    num_removed = tl.full([], 0, dtype=tl.int64)
    num_equal = tl.full([], 0, dtype=tl.int64)
    if top_k > 0:
        floor, _ = _find_kth(bins, states, _NUM_DIGITS, top_k, row, num_rows, num_splits, vocab_size, SPLITS)
    if top_p < 1.0:
        floor, below, total = _find_nucleus(bins, states, _NUM_DIGITS, top_p, row, num_rows, num_splits, SPLITS)
        limit = _nucleus_limit(top_p)
        each = _mass(_weight(_unsortable(floor.to(tl.uint32)), largest), SCALE)
        for bit in tl.static_range(ID_BITS):
            more = num_removed + (1 << (ID_BITS - 1 - bit))
            num_removed = tl.where(_outside(below + more * each, total, limit), more, num_removed)
        # The bins of the last digit hold equal keys, so their masses tell how many are in the programs before this.
        before = tl.arange(0, SPLITS)
        last = (((2 * _NUM_DIGITS - 1) * num_rows + row) * num_splits + before) * _NUM_BINS
        masses = tl.load(bins + last + (floor & (_NUM_BINS - 1)), mask=before < split, other=0)
        num_equal = tl.sum(masses, axis=0) // tl.maximum(each, 1)
    key_1, key_2 = row_keys(tl.load(seeds + row), tl.load(positions + row))
    lowest = floor.to(tl.uint32)
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), dtype=tl.float32)
    best_at = tl.full([TILE], 2147483647, dtype=tl.int32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
        keys = sortable(values)
        kept = mask & (keys >= lowest) & (_weight(values, largest) >= min_p)
        if num_removed > 0:
            equal = mask & (keys == lowest)
            place = num_equal + tl.cumsum(equal.to(tl.int32), axis=0)
            kept = kept & ((place > num_removed) | (equal == 0))
            num_equal += tl.sum(equal.to(tl.int64), axis=0)
        if CHOOSE:
            scores = tl.where(kept, values + gumbel(key_1, key_2, ids), float("-inf"))
            best, best_at = _keep_best(best, best_at, scores, ids)
        else:
            tl.store(scaled + row * vocab_size + ids, tl.where(kept, values, float("-inf")), mask=mask)
    if CHOOSE:
        score, token = _first_best(best, best_at)
        tl.store(best_scores + row * num_splits + split, score)
        tl.store(best_ids + row * num_splits + split, token)


@triton.jit
def _merge_kernel(best_scores, best_ids, out, num_splits, SPLITS: tl.constexpr):
    """The token of a row from the best of each program that shared it; 0 where every score is -inf."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SPLITS)
    mask = at < num_splits
    scores = tl.load(best_scores + row * num_splits + at, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + row * num_splits + at, mask=mask, other=2147483647)
    _, token = _first_best(scores, ids)
    tl.store(out + row, tl.where(token == _NO_TOKEN, 0, token).to(tl.int64))


class _Rows(NamedTuple):
    """Parameters of the rows, [num_rows] each and contiguous."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    positions: Tensor


def _processor_arguments(processors: LogitProcessors | None, logits: Tensor) -> dict[str, Any]:
    """The processors' part of `_scale_kernel`'s arguments; None for what is not used."""
    penalties, bias, grammar_mask = processors or LogitProcessors()
    if processors is not None:
        check_processors(processors, *logits.shape)
    path = None if penalties is None else penalties.path_token_ids
    has_path = path is not None and path.shape[1] > 0
    return {
        "repetitions": None if penalties is None else penalties.repetition.contiguous(),
        "presences": None if penalties is None else penalties.presence.contiguous(),
        "frequencies": None if penalties is None else penalties.frequency.contiguous(),
        "history_slots": None if penalties is None else penalties.slots.contiguous(),
        "prompt_mask": None if penalties is None else _table("prompt_mask", penalties.prompt_mask).view(torch.uint8),
        "output_counts": None if penalties is None else _table("output_counts", penalties.output_counts),
        "path_token_ids": path.contiguous() if has_path else None,
        "path_length": path.shape[1] if has_path else 0,
        "bias_table": None if bias is None else _table("logit_bias.table", bias.table),
        "bias_rows": None if bias is None else bias.rows.contiguous(),
        "grammar_mask": None if grammar_mask is None else grammar_mask.contiguous(),
        "grammar_stride": 0 if grammar_mask is None else grammar_mask.shape[1],
        "HAS_PENALTIES": penalties is not None,
        "HAS_PATH": has_path,
        "HAS_BIAS": bias is not None,
        "HAS_GRAMMAR": grammar_mask is not None,
    }


def _table(name: str, table: Tensor) -> Tensor:
    # Copying one to make it contiguous would cost more than everything else here.
    if not table.is_contiguous():
        raise ValueError(f"{name} has strides {table.stride()}: it must be contiguous")
    return table


def _scale_and_search(
    logits: Tensor,
    rows: _Rows,
    processors: LogitProcessors | None,
    workspace: SamplingWorkspace,
    shares: _Shares,
    *,
    any_filtered: bool,
    choose: bool,
) -> None:
    """Launch everything up to the best score of each share, or up to filtered rows in the workspace."""
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    grid = (num_rows, shares.num_splits)
    splits = triton.next_power_of_2(shares.num_splits)
    _scale_kernel[grid](
        logits,
        logits.stride(0),
        *rows,
        **_processor_arguments(processors, logits),
        scaled=workspace.scaled,
        maxima=workspace.maxima,
        best_scores=workspace.best_scores,
        best_ids=workspace.best_ids,
        vocab_size=vocab_size,
        length=shares.length,
        num_splits=shares.num_splits,
        ANY_FILTERED=any_filtered,
        KEEP_ALL=not choose,
        TILE=_TILE,
        enable_fp_fusion=_FP_FUSION,
    )
    if not any_filtered:
        return
    id_bits = vocab_size.bit_length()
    scale = float(2 ** min(44, 62 - id_bits))
    for mass in (False, True):
        for digit in range(_NUM_DIGITS.value):
            _search_kernel[grid](
                workspace.scaled,
                workspace.maxima,
                rows.temperatures,
                rows.top_ks,
                rows.top_ps,
                workspace.bins,
                workspace.states,
                vocab_size,
                shares.length,
                shares.num_splits,
                digit,
                MASS=mass,
                SCALE=scale,
                SPLITS=splits,
                TILE=_SEARCH_TILE,
                num_warps=8,
                enable_fp_fusion=_FP_FUSION,
            )
    _filter_kernel[grid](
        workspace.scaled,
        workspace.maxima,
        *rows,
        workspace.bins,
        workspace.states,
        workspace.best_scores,
        workspace.best_ids,
        vocab_size,
        shares.length,
        shares.num_splits,
        CHOOSE=choose,
        SCALE=scale,
        ID_BITS=id_bits,
        SPLITS=splits,
        TILE=_TILE,
        enable_fp_fusion=_FP_FUSION,
    )


def process_logits(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    *,
    any_filtered: bool,
    processors: LogitProcessors | None,
) -> Tensor:
    """See `sampling.process_logits`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return torch.empty(0, vocab_size, dtype=torch.float32, device=logits.device)
    workspace = SamplingWorkspace(num_rows, vocab_size, logits.device)
    keys = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    rows = _rows(temperatures, top_ks, top_ps, min_ps, keys, keys)
    with device_of(logits):
        shares = _share(num_rows, vocab_size)
        _scale_and_search(logits, rows, processors, workspace, shares, any_filtered=any_filtered, choose=False)
    return workspace.scaled


def choose_tokens(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    any_filtered: bool,
    processors: LogitProcessors | None,
    workspace: SamplingWorkspace | None,
) -> Tensor:
    """See `sampling.choose_tokens`: two launches, or nineteen with filters."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if workspace is None:
        workspace = SamplingWorkspace(num_rows, vocab_size, logits.device, scaled=any_filtered)
    elif num_rows > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"logits are [{num_rows}, {vocab_size}]: the workspace has room for {workspace.max_rows} rows of "
            f"{workspace.vocab_size}"
        )
    rows = _rows(temperatures, top_ks, top_ps, min_ps, seeds, positions)
    shares = _share(num_rows, vocab_size)
    with device_of(logits):
        _scale_and_search(logits, rows, processors, workspace, shares, any_filtered=any_filtered, choose=True)
        _merge_kernel[(num_rows,)](
            workspace.best_scores,
            workspace.best_ids,
            out,
            shares.num_splits,
            SPLITS=triton.next_power_of_2(shares.num_splits),
            enable_fp_fusion=_FP_FUSION,
        )
    return out


def _rows(*columns: Tensor) -> _Rows:
    return _Rows(*(column.contiguous() for column in columns))
