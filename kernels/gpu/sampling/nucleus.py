"""The edges of top-k and top-p on a GPU: a few passes over the vocabulary narrow the scores that contain the edges.

A span of scores is divided by thresholds. A pass counts the tokens that reach each threshold and sums their weights;
the thresholds around the edges are the next span. The tokens of the last span are listed, and one program per row
searches the list. Counts and weights of the passes may be rounded, because the search verifies, by exact sums, that the
edges lie in the list. If they do not, or if the list is too short, the search reads the whole row.
"""

import triton
import triton.language as tl

from wingbeat.kernels.gpu.sampling.integers import (
    is_outside,
    largest_of_row,
    mass_of,
    nucleus_limit,
    num_outside,
    smallest_of_row,
    sortable,
    unsortable,
    weight_of,
)
from wingbeat.kernels.gpu.sampling.noise import FP_FUSION
from wingbeat.kernels.gpu.sampling.scratch import (
    NUM_BINS,
    NUM_PASSES,
    SPAN_FIELDS,
    Rows,
    SamplingWorkspace,
    Shares,
    slot_of,
)
from wingbeat.kernels.launching import options, wait_for_launch

# Relative error that a sum of a pass's weights, in float32, may have.
_ROUNDING = tl.constexpr(1e-5)


@triton.jit
def _has_edge(temperature, top_k, top_p):
    return (temperature > 0) & ((top_k > 0) | (top_p < 1.0))


@triton.jit
def _thresholds(low, high):
    """float32 [NUM_BINS]: ascending from -inf, then from `low`."""
    at = tl.arange(0, NUM_BINS)
    steps = (at - 1).to(tl.float32) * (1.0 / (NUM_BINS - 1))
    return tl.where(at == 0, float("-inf"), low + (high - low) * steps)


@triton.jit
def _span(
    spans, numbers, weights, row, num_rows, num_splits, top_k, top_p, largest, smallest, vocab_size,
    PASS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Scores that contain the row's edges before a pass: the first score, the score past the last, the score where
    thresholds begin, the sum of all weights (0 before the first pass), and top-k, which is 0 if it removes no token.
    """
    start = float("-inf")
    stop = float("inf")
    total = 0.0
    if PASS == 0:
        k = tl.minimum(top_k, vocab_size).to(tl.float32)
        # Tokens with less than (1 - top_p) / vocabulary of the largest probability are always removed, because all such
        # tokens together have less mass than top-p leaves out. Subtracting 0.7 halves this bound, for rounding.
        bound = tl.maximum(largest + tl.log(tl.maximum(1.0 - top_p, 1e-9) / vocab_size) - 0.7, smallest)
        low = tl.where(k > 0, smallest, bound)
    else:
        state = spans + ((PASS - 1) * num_rows + row) * SPAN_FIELDS
        start = tl.load(state)
        stop = tl.load(state + 1)
        low = tl.load(state + 2)
        total = tl.load(state + 3)
        k = tl.load(state + 4)
        splits = tl.arange(0, SPLITS)[:, None]
        at = tl.arange(0, NUM_BINS)
        sums = (((PASS - 1) * num_rows + row) * num_splits + splits) * NUM_BINS + at[None, :]
        reached = tl.sum(tl.load(numbers + sums, mask=splits < num_splits, other=0), axis=0)
        weight = tl.sum(tl.load(weights + sums, mask=splits < num_splits, other=0.0), axis=0)
        if PASS == 1:
            total = tl.sum(tl.where(at == 0, weight, 0.0), axis=0)
            # Top-k removes no token of a finite score if there are fewer of them.
            finite = tl.sum(tl.where(at == 1, reached, 0), axis=0)
            k = tl.where(finite < k, 0.0, k)
        thresholds = _thresholds(low, tl.minimum(stop, largest))
        thresholds = tl.where(at == 0, start, thresholds)
        # Index of the highest threshold that enough tokens reach; -1 where none is reached, which verification finds.
        kth = tl.sum((reached >= k).to(tl.int32), axis=0) - 1
        most = total
        least = total
        if k > 0:
            most = tl.sum(tl.where(at == kth, weight, 0.0), axis=0)
            least = tl.sum(tl.where(at == kth + 1, weight, 0.0), axis=0)
        first = tl.sum((weight >= top_p * most * (1.0 + _ROUNDING)).to(tl.int32), axis=0) - 1
        last = tl.sum((weight >= top_p * least * (1.0 - _ROUNDING)).to(tl.int32), axis=0) - 1
        first = tl.where(k > 0, kth, first)
        last = tl.where(top_p < 1.0, tl.maximum(last, first), first)
        start = tl.sum(tl.where(at == tl.maximum(first, 0), thresholds, 0.0), axis=0)
        above = tl.sum(tl.where(at == last + 1, thresholds, 0.0), axis=0)
        stop = tl.where(last + 1 < NUM_BINS, above, stop)
        low = tl.maximum(start, smallest)
    return start, stop, low, total, k


@triton.jit
def _store_span(spans, row, num_rows, start, stop, low, total, k, PASS: tl.constexpr):
    state = spans + (PASS * num_rows + row) * SPAN_FIELDS
    tl.store(state, start)
    tl.store(state + 1, stop)
    tl.store(state + 2, low)
    tl.store(state + 3, total)
    tl.store(state + 4, k)


@triton.jit(do_not_specialize=["length", "num_splits"], do_not_specialize_on_alignment=["slots"])
def _pass_kernel(
    scaled,
    maxima,
    minima,
    temperatures,
    top_ks,
    top_ps,
    slots,
    spans,
    numbers,
    weights,
    num_listed,  # this and the next three: None in passes that narrow the span
    listed,
    listed_ids,
    masses,
    vocab_size,
    length,
    num_splits,
    SCALE: tl.constexpr,
    LISTED: tl.constexpr,
    PASS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Reads a share of a row once.

    A pass that narrows the span counts the tokens that reach each threshold of the span, and sums their weights. The
    last pass lists the tokens of the span, in any order, and sums the masses of all tokens and of the tokens above.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_rows = tl.num_programs(0)
    slot = slot_of(slots, row)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    if _has_edge(tl.load(temperatures + slot), top_k, top_p) == 0:
        return
    largest = largest_of_row(maxima, row, num_splits, SPLITS)
    smallest = smallest_of_row(minima, row, num_splits, SPLITS)
    start, stop, low, sum_of_weights, k = _span(
        spans, numbers, weights, row, num_rows, num_splits, top_k, top_p, largest, smallest, vocab_size, PASS, SPLITS
    )
    if split == 0:
        _store_span(spans, row, num_rows, start, stop, low, sum_of_weights, k, PASS)
    lanes = tl.arange(0, TILE)
    begin = split * length
    end = tl.minimum(begin + length, vocab_size)
    if listed is None:
        thresholds = _thresholds(low, tl.minimum(stop, largest))
        thresholds = tl.where(tl.arange(0, NUM_BINS) == 0, start, thresholds)[:, None]
        found = tl.zeros([NUM_BINS, TILE], dtype=tl.int32)
        sums = tl.zeros([NUM_BINS, TILE], dtype=tl.float32)
        for first in range(begin, end, TILE):
            ids = first + lanes
            mask = ids < vocab_size
            values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
            # After the first pass most tiles contain no token of the span.
            if tl.max(values, axis=0) >= start:
                reached = (values[None, :] >= thresholds) & mask[None, :]
                found += reached.to(tl.int32)
                sums += tl.where(reached, weight_of(values, largest)[None, :], 0.0)
        at = ((PASS * num_rows + row) * num_splits + split) * NUM_BINS + tl.arange(0, NUM_BINS)
        tl.store(numbers + at, tl.sum(found, axis=1))
        tl.store(weights + at, tl.sum(sums, axis=1))
    else:
        total = tl.zeros([TILE], dtype=tl.int64)
        mass_above = tl.zeros([TILE], dtype=tl.int64)
        num_above = tl.zeros([TILE], dtype=tl.int64)
        for first in range(begin, end, TILE):
            ids = first + lanes
            mask = ids < vocab_size
            values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
            own = tl.where(mask, mass_of(weight_of(values, largest), SCALE), 0)
            total += own
            above = mask & (values >= stop)
            mass_above += tl.where(above, own, 0)
            num_above += above.to(tl.int64)
            wanted = (mask & (values >= start) & (values < stop)).to(tl.int32)
            count = tl.sum(wanted, axis=0)
            if count > 0:
                place = tl.atomic_add(num_listed + row, count) + tl.cumsum(wanted, axis=0) - 1
                room = (wanted > 0) & (place < LISTED)
                tl.store(listed + row * LISTED + place, values, mask=room)
                tl.store(listed_ids + row * LISTED + place, ids, mask=room)
        share = row * num_splits + split
        of_sum = num_rows * num_splits
        tl.store(masses + share, tl.sum(total, axis=0))
        tl.store(masses + of_sum + share, tl.sum(mass_above, axis=0))
        tl.store(masses + 2 * of_sum + share, tl.sum(num_above, axis=0))


@triton.jit
def _reaching(values_ptr, num_values, key, largest, SCALE: tl.constexpr, LANES: tl.constexpr):
    """Number and mass of the tokens whose keys are at least `key`."""
    number = tl.full([], 0, dtype=tl.int64)
    mass = tl.full([], 0, dtype=tl.int64)
    for first in range(0, num_values, LANES):
        at = first + tl.arange(0, LANES)
        values = tl.load(values_ptr + at, mask=at < num_values, other=float("-inf"))
        reached = (at < num_values) & (sortable(values).to(tl.int64) >= key)
        number += tl.sum(reached.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(reached, mass_of(weight_of(values, largest), SCALE), 0), axis=0)
    return number, mass


@triton.jit
def _last_of_equals(values_ptr, ids_ptr, num_values, key, num_removed, vocab_size, LANES: tl.constexpr):
    """Id of the `num_removed`-th token, by id, among the tokens with a key; -1 if none is removed."""
    low = tl.full([], -1, dtype=tl.int64)
    if num_removed > 0:
        low += 1
        high = tl.full([], 0, dtype=tl.int64) + vocab_size
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.full([], 0, dtype=tl.int64)
            for first in range(0, num_values, LANES):
                at = first + tl.arange(0, LANES)
                mask = at < num_values
                ids = at
                if ids_ptr is not None:
                    ids = tl.load(ids_ptr + at, mask=mask, other=0)
                values = tl.load(values_ptr + at, mask=mask & (ids < middle), other=float("nan"))
                equal = mask & (ids < middle) & (sortable(values).to(tl.int64) == key)
                before += tl.sum(equal.to(tl.int64), axis=0)
            low = tl.where(before < num_removed, middle, low)
            high = tl.where(before < num_removed, high, middle)
    return low


@triton.jit
def _find_edges(
    values_ptr, ids_ptr, num_values, lowest, highest, num_above, mass_above, total, top_k, top_p, largest, vocab_size,
    SCALE: tl.constexpr, ID_BITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Searches tokens whose keys are in [lowest, highest): the lowest kept key, the last removed id among its tokens,
    and whether the edges lie among these tokens.

    Args:
        num_above, mass_above: number and mass of the row's tokens with higher keys.
        total: mass of all tokens of the row.
    """
    inside = (num_above < top_k) & (num_above + num_values >= top_k) | (top_k <= 0)
    low = tl.where((top_k > 0) | (top_p < 1.0), lowest, 0)
    if top_k > 0:
        high = highest
        while high - low > 1:
            middle = (low + high) // 2
            number, _ = _reaching(values_ptr, num_values, middle, largest, SCALE, LANES)
            low = tl.where(num_above + number >= top_k, middle, low)
            high = tl.where(num_above + number >= top_k, high, middle)
        _, mass = _reaching(values_ptr, num_values, low, largest, SCALE, LANES)
        total = mass_above + mass
    last_removed = tl.full([], -1, dtype=tl.int64)
    if top_p < 1.0:
        limit = nucleus_limit(top_p)
        _, mass = _reaching(values_ptr, num_values, low, largest, SCALE, LANES)
        # A row without any mass keeps all tokens.
        inside = inside & (is_outside(total - mass_above - mass, total, limit) | (total <= 0))
        inside = inside & (is_outside(total - mass_above, total, limit) == 0)
        high = highest
        while high - low > 1:
            middle = (low + high) // 2
            _, mass = _reaching(values_ptr, num_values, middle, largest, SCALE, LANES)
            outside = is_outside(total - mass_above - mass, total, limit)
            low = tl.where(outside, middle, low)
            high = tl.where(outside, high, middle)
        _, mass = _reaching(values_ptr, num_values, low, largest, SCALE, LANES)
        each = mass_of(weight_of(unsortable(low.to(tl.uint32)), largest), SCALE)
        num_removed = num_outside(total - mass_above - mass, each, total, limit, ID_BITS)
        last_removed = _last_of_equals(values_ptr, ids_ptr, num_values, low, num_removed, vocab_size, LANES)
    return low, last_removed, inside


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["slots"])
def _edge_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    slots,
    spans,
    num_listed,
    listed,
    listed_ids,
    masses,
    edges,
    vocab_size,
    num_splits,
    SCALE: tl.constexpr,
    ID_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    PASS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the lowest key that a row keeps, and the last removed id among the tokens with that key.

    Without WHOLE, rows whose edges are not in the list keep all tokens.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    slot = slot_of(slots, row)
    top_p = tl.load(top_ps + slot)
    lowest = tl.full([], 0, dtype=tl.int64)
    last_removed = tl.full([], -1, dtype=tl.int64)
    if _has_edge(tl.load(temperatures + slot), tl.load(top_ks + slot), top_p):
        state = spans + (PASS * num_rows + row) * SPAN_FIELDS
        top_k = tl.load(state + 4).to(tl.int64)
        largest = largest_of_row(maxima, row, num_splits, SPLITS)
        at = tl.arange(0, SPLITS)
        shares = masses + row * num_splits + at
        of_sum = num_rows * num_splits
        total = tl.sum(tl.load(shares, mask=at < num_splits, other=0), axis=0)
        mass_above = tl.sum(tl.load(shares + of_sum, mask=at < num_splits, other=0), axis=0)
        num_above = tl.sum(tl.load(shares + 2 * of_sum, mask=at < num_splits, other=0), axis=0)
        num_values = tl.load(num_listed + row)
        inside = num_values <= LISTED
        if inside:
            begin = sortable(tl.load(state)).to(tl.int64)
            end = sortable(tl.load(state + 1)).to(tl.int64)
            lowest, last_removed, inside = _find_edges(
                listed + row * LISTED, listed_ids + row * LISTED, num_values, begin, end, num_above, mass_above, total,
                top_k, top_p, largest, vocab_size, SCALE, ID_BITS, LISTED,
            )  # fmt: skip
        if inside == 0:
            lowest = tl.full([], 0, dtype=tl.int64)
            last_removed = tl.full([], -1, dtype=tl.int64)
            if WHOLE:
                none = tl.full([], 0, dtype=tl.int64)
                lowest, last_removed, _ = _find_edges(
                    scaled + row * vocab_size, None, vocab_size, none, none + 4294967296, none, none, total,
                    top_k, top_p, largest, vocab_size, SCALE, ID_BITS, LISTED,
                )  # fmt: skip
    tl.store(edges + row * 2, lowest)
    tl.store(edges + row * 2 + 1, last_removed)


def find_edges(rows: Rows, workspace: SamplingWorkspace, shares: Shares, *, listed_only: bool) -> None:
    """Writes the `edges` of every row; 0 and -1, which keep all tokens, for a row without top-k and top-p.

    Args:
        listed_only: narrows by one pass instead of `NUM_PASSES`, and never reads whole rows in the search. A row whose
            edges are not in its list keeps all tokens.
    """
    num_rows, vocab_size = len(rows.positions), workspace.vocab_size
    grid, num_passes = (num_rows, shares.num_splits), 1 if listed_only else NUM_PASSES
    id_bits = vocab_size.bit_length()
    scale = float(2 ** min(44, 62 - id_bits))
    parameters = (rows.temperatures, rows.top_ks, rows.top_ps, rows.slots, workspace.spans)
    passes = (workspace.scaled, workspace.maxima, workspace.minima, *parameters, workspace.numbers, workspace.weights)
    lists = (workspace.num_listed, workspace.listed, workspace.listed_ids, workspace.masses)
    whole = (vocab_size, shares.length, shares.num_splits)
    known = {"SPLITS": shares.most_splits, **options(fused=FP_FUSION)}
    found = {"SCALE": scale, "LISTED": workspace.listed.shape[1], **known}
    for number in range(num_passes):
        _pass_kernel[grid](
            *passes, *[None] * len(lists), *whole, PASS=number, TILE=shares.search_tile, num_warps=8, **found
        )
    found["PASS"] = num_passes
    _pass_kernel[grid](*passes, *lists, *whole, TILE=shares.tile, **found)
    _edge_kernel[(num_rows,)](
        workspace.scaled, workspace.maxima, *parameters, *lists, workspace.edges, vocab_size, shares.num_splits,
        ID_BITS=id_bits, WHOLE=not listed_only, num_warps=8, **found,
    )  # fmt: skip
