"""Floats as integers: keys of the same order, which kernels search, and masses in fixed point, summed in any order."""

import triton
import triton.language as tl


@triton.jit
def sortable(values):
    """uint32 in the order of the floats; -0 has been made 0."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def unsortable(keys):
    """The floats of `sortable` keys."""
    bits = (keys ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(values, largest):
    """Probability relative to the largest."""
    return tl.exp(values - largest)


@triton.jit
def mass_of(weights, SCALE: tl.constexpr):
    """Weights 0..1 as fixed-point int64. A token's error is below 2**-44, that of 2**18 of them below 2**-26."""
    return (weights * SCALE + 0.5).to(tl.int64)


@triton.jit
def largest_of_row(maxima, row, num_splits, SPLITS: tl.constexpr):
    """Largest value of a row, 0 where all are -inf so that differences from it are numbers."""
    at = tl.arange(0, SPLITS)
    shares = tl.load(maxima + row * num_splits + at, mask=at < num_splits, other=float("-inf"))
    largest = tl.max(shares, axis=0)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def is_outside(mass, total, limit):
    """Whether a token with this mass, counted from below and itself included, is removed by top-p."""
    return (mass < total) & ((mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32) <= limit)


@triton.jit
def nucleus_limit(top_p):
    """Largest share of the mass that is outside."""
    return (1.0 - top_p.to(tl.float64)).to(tl.float32)


@triton.jit
def num_outside(below, each, total, limit, ID_BITS: tl.constexpr):
    """Number of equal tokens, of mass `each` above the mass `below`, that top-p removes."""
    found = tl.full([], 0, dtype=tl.int64)
    for bit in tl.static_range(ID_BITS):
        more = found + (1 << (ID_BITS - 1 - bit))
        found = tl.where(is_outside(below + more * each, total, limit), more, found)
    return found
