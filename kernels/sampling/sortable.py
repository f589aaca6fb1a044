"""Floats as integers of the same order, for kernels that search or rank them by their bits."""

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
