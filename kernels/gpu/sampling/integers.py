"""Floats as integers: order-preserving keys for searches, and fixed-point masses, whose sums are exact in any order."""

import triton
import triton.language as tl


@triton.jit
def sortable(values):
    """Converts floats to uint32 keys of the same order. The caller replaces -0 by 0."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def unsortable(keys):
    """Converts `sortable` keys back to floats."""
    bits = (keys ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(values, largest):
    """Probability relative to the largest: exp(values - largest)."""
    return tl.exp(values - largest)


@triton.jit
def mass_of(weights, SCALE: tl.constexpr):
    """Converts weights in 0..1 to fixed-point int64.

    The rounding error of one mass is below 2**-44. The error of a sum of 2**18 masses is therefore below 2**-26.
    """
    return (weights * SCALE + 0.5).to(tl.int64)


@triton.jit
def largest_of_row(maxima, row, num_splits, SPLITS: tl.constexpr):
    """Largest value of a row over its shares; 0 if all are -inf, so that differences from the result are never NaN."""
    at = tl.arange(0, SPLITS)
    shares = tl.load(maxima + row * num_splits + at, mask=at < num_splits, other=float("-inf"))
    largest = tl.max(shares, axis=0)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def smallest_of_row(minima, row, num_splits, SPLITS: tl.constexpr):
    """Smallest finite value of a row over its shares; 0 if there is none."""
    at = tl.arange(0, SPLITS)
    smallest = tl.min(tl.load(minima + row * num_splits + at, mask=at < num_splits, other=float("inf")), axis=0)
    return tl.where(smallest == float("inf"), 0.0, smallest)


@triton.jit
def is_outside(mass, total, limit):
    """Whether top-p removes a token, given the mass of this token and of all tokens that are less likely."""
    return (mass < total) & ((mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32) <= limit)


@triton.jit
def nucleus_limit(top_p):
    """Largest share of the mass that top-p removes."""
    return (1.0 - top_p.to(tl.float64)).to(tl.float32)


@triton.jit
def num_outside(below, each, total, limit, ID_BITS: tl.constexpr):
    """Number of tokens that top-p removes among tokens with equal scores. Each of these tokens has mass `each`; all
    tokens with lower scores together have mass `below`.
    """
    found = tl.full([], 0, dtype=tl.int64)
    for bit in tl.static_range(ID_BITS):
        more = found + (1 << (ID_BITS - 1 - bit))
        found = tl.where(is_outside(below + more * each, total, limit), more, found)
    return found
