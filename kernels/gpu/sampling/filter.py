"""Top-k, top-p and min-p on a GPU: searches the filters' edges, and finds the best score among the kept tokens.

If `nucleus` found a row's edge in a list, the search's launches return at once for that row. Other edges are searched
digit by digit of the float's bits, without a sort: each launch bins the tokens that match the digits found so far, and
the next launch reads the bins. Counts and masses are integers, so sums do not depend on the number or order of
programs. Reference: `sampling.process_logits`.
"""

import triton
import triton.language as tl

from wingbeat.kernels.gpu.sampling.integers import (
    is_outside,
    largest_of_row,
    mass_of,
    nucleus_limit,
    num_outside,
    sortable,
    unsortable,
    weight_of,
)
from wingbeat.kernels.gpu.sampling.noise import FP_FUSION, gumbel, row_keys
from wingbeat.kernels.gpu.sampling.nucleus import find_nuclei
from wingbeat.kernels.gpu.sampling.scores import first_best, is_filtered, keep_best
from wingbeat.kernels.gpu.sampling.scratch import (
    DIGIT_BITS,
    NUM_BINS,
    NUM_DIGITS,
    Rows,
    SamplingWorkspace,
    Shares,
)
from wingbeat.kernels.launching import options, wait_for_launch


@triton.jit
def _merged_bins(bins, search: tl.constexpr, digit, row, num_rows, num_splits, SPLITS: tl.constexpr):
    """int64 [NUM_BINS]: sums a digit's bins of a row over the programs that share the row."""
    at = tl.arange(0, SPLITS)[:, None]
    first = ((search * NUM_DIGITS + digit) * num_rows + row) * num_splits
    shares = tl.load(bins + (first + at) * NUM_BINS + tl.arange(0, NUM_BINS)[None, :], mask=at < num_splits, other=0)
    return tl.sum(shares, axis=0)


@triton.jit
def _find_kth(bins, states, digit, top_k, row, num_rows, num_splits, vocab_size, SPLITS: tl.constexpr):
    """Digits above `digit` of the k-th largest key.

    Also returns the key's rank from the top among the keys with these digits.
    """
    prefix = tl.full([], 0, dtype=tl.int64)
    rank = tl.minimum(top_k, vocab_size).to(tl.int64)
    if digit > 0:
        state = states + ((digit - 1) * num_rows + row) * 3
        # Before the first digit nothing has been stored, so the initial state is used.
        prefix = tl.load(state, mask=digit > 1, other=0)
        rank = tl.where(digit > 1, tl.load(state + 1, mask=digit > 1, other=0), rank)
        counts = _merged_bins(bins, 0, digit - 1, row, num_rows, num_splits, SPLITS)
        places = tl.arange(0, NUM_BINS)
        not_below = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        found = tl.sum((not_below >= rank).to(tl.int64), axis=0) - 1
        rank -= tl.sum(tl.where(places > found, counts, 0), axis=0)
        prefix = prefix * NUM_BINS + found
    return prefix, rank


@triton.jit
def _find_nucleus(bins, states, digit, top_p, row, num_rows, num_splits, SPLITS: tl.constexpr):
    """Digits above `digit` of the lowest key that top-p keeps.

    Also returns the mass below the keys with these digits, and the total mass.
    """
    prefix = tl.full([], 0, dtype=tl.int64)
    below = tl.full([], 0, dtype=tl.int64)
    total = tl.full([], 0, dtype=tl.int64)
    if digit > 0:
        state = states + ((NUM_DIGITS + digit - 1) * num_rows + row) * 3
        prefix = tl.load(state, mask=digit > 1, other=0)
        below = tl.load(state + 1, mask=digit > 1, other=0)
        masses = _merged_bins(bins, 1, digit - 1, row, num_rows, num_splits, SPLITS)
        # All kept tokens are in some bin of the first digit, so these bins sum to the total mass.
        total = tl.where(digit > 1, tl.load(state + 2, mask=digit > 1, other=0), tl.sum(masses, axis=0))
        places = tl.arange(0, NUM_BINS)
        cumulative = below + tl.cumsum(masses, axis=0)
        found = tl.sum(is_outside(cumulative, total, nucleus_limit(top_p)).to(tl.int64), axis=0)
        below += tl.sum(tl.where(places < found, masses, 0), axis=0)
        prefix = prefix * NUM_BINS + found
    return prefix, below, total


@triton.jit(do_not_specialize=["length", "num_splits", "digit"])
def _search_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    edges,
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
    EARLY: tl.constexpr,
):
    """Bins one digit of the keys whose higher digits equal the edge's: counts for top-k, masses for top-p."""
    wait_for_launch(EARLY)
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
    if tl.load(edges + row * 2) >= 0:
        return
    floor = tl.full([], 0, dtype=tl.int64)
    largest = 0.0
    if MASS:
        largest = largest_of_row(maxima, row, num_splits, SPLITS)
        if top_k > 0:
            floor, _ = _find_kth(bins, states, NUM_DIGITS, top_k, row, num_rows, num_splits, vocab_size, SPLITS)
        prefix, below, total = _find_nucleus(bins, states, digit, top_p, row, num_rows, num_splits, SPLITS)
    else:
        prefix, below = _find_kth(bins, states, digit, top_k, row, num_rows, num_splits, vocab_size, SPLITS)
        total = prefix
    if split == 0:
        state = states + ((MASS * NUM_DIGITS + digit) * num_rows + row) * 3
        tl.store(state, prefix)
        tl.store(state + 1, below)
        tl.store(state + 2, total)
    lowest = floor.to(tl.uint32)
    wanted = prefix.to(tl.uint32)
    shift = (NUM_DIGITS - 1 - digit) * DIGIT_BITS
    lanes = tl.arange(0, TILE)
    places = tl.arange(0, NUM_BINS)[:, None]
    if MASS:
        found = tl.zeros([NUM_BINS, TILE], dtype=tl.int64)
    else:
        found = tl.zeros([NUM_BINS, TILE], dtype=tl.int32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
        keys = sortable(values)
        digits = keys >> shift
        # Keys are shifted in two steps, because a shift by all 32 bits is undefined.
        matching = mask & ((digits >> DIGIT_BITS) == wanted)
        if MASS:
            matching = matching & (keys >= lowest)
        # After a few digits most tiles contain no matching key.
        if tl.max(matching.to(tl.int32), axis=0) > 0:
            here = ((digits & (NUM_BINS - 1)).to(tl.int32)[None, :] == places) & matching[None, :]
            if MASS:
                found += tl.where(here, mass_of(weight_of(values, largest), SCALE)[None, :], 0)
            else:
                found += here.to(tl.int32)
    first = (((MASS * NUM_DIGITS + digit) * num_rows + row) * num_splits + split) * NUM_BINS
    tl.store(bins + first + tl.arange(0, NUM_BINS), tl.sum(found, axis=1).to(tl.int64))


@triton.jit(do_not_specialize=["length", "num_splits"])
def _filter_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    edges,
    bins,
    states,
    best_scores,
    best_ids,
    vocab_size,
    length,
    num_splits,
    CHOOSE: tl.constexpr,
    SEARCHED: tl.constexpr,
    SCALE: tl.constexpr,
    ID_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the best score among the tokens that a filtered row keeps.

    Without CHOOSE, sets the scores of removed tokens to -inf instead.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_rows = tl.num_programs(0)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    if is_filtered(tl.load(temperatures + row), top_k, top_p, min_p) == 0:
        return
    largest = largest_of_row(maxima, row, num_splits, SPLITS)
    floor = tl.load(edges + row * 2)
    # Among tokens whose key equals the floor, top-p removes the tokens with the lowest ids. If `nucleus` found the
    # floor, all ids up to `last_removed` are removed, else the first `num_removed` tokens.
    last_removed = tl.full([], -1, dtype=tl.int64)
    num_removed = tl.full([], 0, dtype=tl.int64)
    num_equal = tl.full([], 0, dtype=tl.int64)
    if floor >= 0:
        last_removed = tl.load(edges + row * 2 + 1)
    else:
        floor = tl.full([], 0, dtype=tl.int64)
        if SEARCHED:
            if top_k > 0:
                floor, _ = _find_kth(bins, states, NUM_DIGITS, top_k, row, num_rows, num_splits, vocab_size, SPLITS)
            if top_p < 1.0:
                floor, below, total = _find_nucleus(bins, states, NUM_DIGITS, top_p, row, num_rows, num_splits, SPLITS)
                each = mass_of(weight_of(unsortable(floor.to(tl.uint32)), largest), SCALE)
                num_removed = num_outside(below, each, total, nucleus_limit(top_p), ID_BITS)
                # A bin of the last digit holds equal keys, so the bin's mass divided by the mass of one key is the
                # number of equal keys. Only the shares before this program's share are summed.
                before = tl.arange(0, SPLITS)
                last = (((2 * NUM_DIGITS - 1) * num_rows + row) * num_splits + before) * NUM_BINS
                masses = tl.load(bins + last + (floor & (NUM_BINS - 1)), mask=before < split, other=0)
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
        kept = mask & (keys >= lowest) & (weight_of(values, largest) >= min_p)
        kept = kept & ((keys != lowest) | (ids > last_removed))
        if num_removed > 0:
            equal = mask & (keys == lowest)
            place = num_equal + tl.cumsum(equal.to(tl.int32), axis=0)
            kept = kept & ((place > num_removed) | (equal == 0))
            num_equal += tl.sum(equal.to(tl.int64), axis=0)
        if CHOOSE:
            scores = tl.where(kept, values + gumbel(key_1, key_2, ids), float("-inf"))
            best, best_at = keep_best(best, best_at, scores, ids)
        else:
            # In a short tile several warps hold the same element, so all warps must have read before one of them
            # writes.
            tl.debug_barrier()
            tl.store(scaled + row * vocab_size + ids, tl.where(kept, values, float("-inf")), mask=mask)
    if CHOOSE:
        score, token = first_best(best, best_at)
        tl.store(best_scores + row * num_splits + split, score)
        tl.store(best_ids + row * num_splits + split, token)


def filter_rows(
    rows: Rows, workspace: SamplingWorkspace, shares: Shares, *, choose: bool, listed_only: bool = False
) -> None:
    """Filters the rows that `scale_rows` stored.

    Finds the best score of each share, or without `choose` sets removed tokens to -inf in place.

    Args:
        listed_only: skips the search. A row whose edge `nucleus` did not find in the row's list is then filtered by
            min-p alone.
    """
    num_rows, vocab_size = len(rows.temperatures), workspace.vocab_size
    grid = (num_rows, shares.num_splits)
    id_bits = vocab_size.bit_length()
    scale = float(2 ** min(44, 62 - id_bits))
    find_nuclei(rows, workspace, shares, scale, id_bits, top_k_alone=listed_only)
    for mass in () if listed_only else (False, True):
        for digit in range(NUM_DIGITS.value):
            _search_kernel[grid](
                workspace.scaled,
                workspace.maxima,
                rows.temperatures,
                rows.top_ks,
                rows.top_ps,
                workspace.edges,
                workspace.bins,
                workspace.states,
                vocab_size,
                shares.length,
                shares.num_splits,
                digit,
                MASS=mass,
                SCALE=scale,
                SPLITS=shares.most_splits,
                TILE=shares.search_tile,
                num_warps=8,
                **options(fused=FP_FUSION),
            )
    _filter_kernel[grid](
        workspace.scaled,
        workspace.maxima,
        *rows,
        workspace.edges,
        workspace.bins,
        workspace.states,
        workspace.best_scores,
        workspace.best_ids,
        vocab_size,
        shares.length,
        shares.num_splits,
        CHOOSE=choose,
        SEARCHED=not listed_only,
        SCALE=scale,
        ID_BITS=id_bits,
        SPLITS=shares.most_splits,
        TILE=shares.tile,
        **options(fused=FP_FUSION),
    )
