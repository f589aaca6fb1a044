"""The edge of top-p on a GPU in one pass over the vocabulary: lists the tokens that may be kept, and searches the list.

A token with less than (1 - top_p) / vocabulary of the largest probability is always removed, because all such tokens
together have less mass than top-p leaves out. Usually a few hundred tokens remain. Rows with more remaining tokens than
the list holds, or with fewer remaining tokens than top-k keeps, are left to the search of `filter`.

With `listed_only`, where nothing is searched, rows with top-k alone are listed too, down to an estimated bound.
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
from wingbeat.kernels.gpu.sampling.noise import FP_FUSION
from wingbeat.kernels.gpu.sampling.scratch import Rows, SamplingWorkspace, Shares
from wingbeat.kernels.launching import options, wait_for_launch


@triton.jit
def _has_list(temperature, top_k, top_p, TOP_K_ALONE: tl.constexpr):
    listed = top_p < 1.0
    if TOP_K_ALONE:
        listed = listed | (top_k > 0)
    return (temperature > 0) & listed


@triton.jit
def _bound_of_top_k(maxima, row, num_splits, top_k, temperature, SPLITS: tl.constexpr):
    """Estimates, from the maxima of a row's shares, a score that about `top_k` tokens of the row, or more, reach."""
    at = tl.arange(0, SPLITS)
    there = at < num_splits
    peaks = tl.load(maxima + row * num_splits + at, mask=there, other=float("-inf"))
    keys = tl.where(there, sortable(peaks).to(tl.int64), -1)
    # The bound is the `rank`-th largest maximum, so at least `rank` tokens reach it. The lower half of the maxima is
    # not used, because a share without likely tokens carries no information.
    rank = tl.minimum(top_k, tl.maximum((num_splits + 1) // 2, 1).to(tl.int64))
    one = tl.full([], 1, dtype=tl.int64)
    bound = tl.full([], 0, dtype=tl.int64)
    for place in range(32):
        trial = bound | (one << (31 - place))
        bound = tl.where(tl.sum((keys >= trial).to(tl.int32), axis=0) >= rank, trial, bound)
    missing = tl.where(top_k > rank, tl.log(4.0 * top_k / rank), 0.0)
    return unsortable(bound.to(tl.uint32)) - missing / temperature


@triton.jit(do_not_specialize=["length", "num_splits"])
def _collect_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    counts,
    listed,
    listed_ids,
    masses,
    edges,
    vocab_size,
    length,
    num_splits,
    SCALE: tl.constexpr,
    LISTED: tl.constexpr,
    TOP_K_ALONE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Lists the tokens that top-p may keep, in any order, and sums the mass of all tokens."""
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    top_p = tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    temperature = tl.load(temperatures + row)
    if split == 0:
        tl.store(edges + row * 2, -1)
    if _has_list(temperature, top_k, top_p, TOP_K_ALONE) == 0:
        return
    largest = largest_of_row(maxima, row, num_splits, SPLITS)
    # Subtracting 0.7 halves the bound of the probability, as a margin for rounding. Subtracting 8.0 for rows with top-k
    # lists more tokens, because after top-k top-p may keep tokens that it would remove without top-k.
    lowest = largest + tl.log((1.0 - top_p) / vocab_size) - 0.7
    lowest = tl.where(top_k > 0, lowest - 8.0, lowest)
    if TOP_K_ALONE:  # noqa: SIM102
        if top_p >= 1.0:
            lowest = _bound_of_top_k(maxima, row, num_splits, top_k, temperature, SPLITS)
            if vocab_size <= LISTED:
                lowest = float("-inf")
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.int64)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
        total += tl.where(mask, mass_of(weight_of(values, largest), SCALE), 0)
        wanted = (mask & (values >= lowest)).to(tl.int32)
        count = tl.sum(wanted, axis=0)
        if count > 0:
            place = tl.atomic_add(counts + row, count) + tl.cumsum(wanted, axis=0) - 1
            room = (wanted > 0) & (place < LISTED)
            tl.store(listed + row * LISTED + place, values, mask=room)
            tl.store(listed_ids + row * LISTED + place, ids, mask=room)
    tl.store(masses + row * num_splits + split, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_splits"])
def _edge_kernel(
    maxima,
    temperatures,
    top_ks,
    top_ps,
    counts,
    listed,
    listed_ids,
    masses,
    edges,
    vocab_size,
    num_splits,
    SCALE: tl.constexpr,
    ID_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    TOP_K_ALONE: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the lowest key that a listed row keeps, and the highest removed id among the tokens with that key."""
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps + row)
    top_k = tl.minimum(tl.load(top_ks + row), vocab_size)
    if _has_list(tl.load(temperatures + row), top_k, top_p, TOP_K_ALONE) == 0:
        return
    count = tl.load(counts + row)
    if (count > LISTED) | (count < top_k):
        return
    lanes = tl.arange(0, LISTED)
    there = lanes < count
    values = tl.load(listed + row * LISTED + lanes, mask=there, other=float("-inf"))
    ids = tl.load(listed_ids + row * LISTED + lanes, mask=there, other=0)
    keys = tl.where(there, sortable(values).to(tl.int64), -1)
    largest = largest_of_row(maxima, row, num_splits, SPLITS)
    own = tl.where(there, mass_of(weight_of(values, largest), SCALE), 0)
    at = tl.arange(0, SPLITS)
    total = tl.sum(tl.load(masses + row * num_splits + at, mask=at < num_splits, other=0), axis=0)
    one = tl.full([], 1, dtype=tl.int64)
    kth = tl.full([], 0, dtype=tl.int64)
    if top_k > 0:
        for place in range(32):
            trial = kth | (one << (31 - place))
            kth = tl.where(tl.sum((keys >= trial).to(tl.int32), axis=0) >= top_k, trial, kth)
        own = tl.where(keys >= kth, own, 0)
        total = tl.sum(own, axis=0)
    limit = nucleus_limit(top_p)
    floor = tl.full([], 0, dtype=tl.int64)
    for place in range(32):
        trial = floor | (one << (31 - place))
        below = total - tl.sum(tl.where(keys >= trial, own, 0), axis=0)
        floor = tl.where(is_outside(below, total, limit), trial, floor)
    below = total - tl.sum(tl.where(keys >= floor, own, 0), axis=0)
    each = mass_of(weight_of(unsortable(floor.to(tl.uint32)), largest), SCALE)
    num_removed = num_outside(below, each, total, limit, ID_BITS)
    equal = keys == floor
    last = tl.full([], 0, dtype=tl.int64)
    for place in range(ID_BITS):
        trial = last | (one << (ID_BITS - 1 - place))
        num_before = tl.sum((equal & (ids < trial)).to(tl.int64), axis=0)
        last = tl.where(num_before < num_removed, trial, last)
    if TOP_K_ALONE:
        floor = tl.where(top_p < 1.0, floor, kth)
        num_removed = tl.where(top_p < 1.0, num_removed, 0)
    tl.store(edges + row * 2, floor)
    tl.store(edges + row * 2 + 1, tl.where(num_removed > 0, last, -1))


def find_nuclei(
    rows: Rows, workspace: SamplingWorkspace, shares: Shares, scale: float, id_bits: int, *, top_k_alone: bool = False
) -> None:
    """Writes `edges` of the rows whose list contains the edge; writes -1 for all other rows.

    Args:
        scale: fixed-point scale of masses.
        id_bits: bits of the vocabulary size.
        top_k_alone: whether rows that have top-k but not top-p are listed too.
    """
    num_rows, vocab_size = len(rows.temperatures), workspace.vocab_size
    parameters = (workspace.maxima, rows.temperatures, rows.top_ks, rows.top_ps)
    lists = (workspace.counts, workspace.listed, workspace.listed_ids, workspace.masses, workspace.edges)
    listed = workspace.listed.shape[1]
    workspace.counts[:num_rows].zero_()
    _collect_kernel[(num_rows, shares.num_splits)](
        workspace.scaled,
        *parameters,
        *lists,
        vocab_size,
        shares.length,
        shares.num_splits,
        SCALE=scale,
        LISTED=listed,
        TOP_K_ALONE=top_k_alone,
        SPLITS=shares.most_splits,
        TILE=shares.tile,
        **options(fused=FP_FUSION),
    )
    _edge_kernel[(num_rows,)](
        *parameters,
        *lists,
        vocab_size,
        shares.num_splits,
        SCALE=scale,
        ID_BITS=id_bits,
        LISTED=listed,
        TOP_K_ALONE=top_k_alone,
        SPLITS=shares.most_splits,
        num_warps=8,
        **options(fused=FP_FUSION),
    )
