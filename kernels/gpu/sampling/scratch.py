"""Parameters, division among programs and scratch memory of the sampling kernels' rows."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of thresholds that a pass divides a span of scores by: as many as a program can hold per lane in registers.
NUM_BINS = tl.constexpr(16)
NUM_PASSES = 3
# Fields of a span: see `nucleus`.
SPAN_FIELDS = tl.constexpr(5)

# Tokens that a program handles at a time, for one value and for NUM_BINS values per token; both numbers divide a
# program's share.
_TILE = 1024
_SEARCH_TILE = 512
# Number of programs that fill a large GPU twice; and the maximum number of programs that share a row, which is bounded
# because each of these programs reads the results of all of them.
_NUM_PROGRAMS = 264
_MAX_SPLITS = 128
_LISTED = 2048
"""Maximum number of listed tokens of a row, a power of two: as many as one program can search in registers."""


class SamplingWorkspace:
    """Scratch memory of `choose_tokens` at constant addresses. Carries no state between calls.

    Args:
        max_rows: maximum number of rows of a call, at least 1.
        vocab_size: columns of the logits.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, *, scaled: bool = True, chooses: bool = True
    ) -> None:
        if max_rows < 1 or vocab_size < 1:
            raise ValueError(f"max_rows is {max_rows} and vocab_size is {vocab_size}: both must be at least 1")
        self.max_rows, self.vocab_size = max_rows, vocab_size
        shares = max(max_rows, _NUM_PROGRAMS)
        searched = shares if scaled else 0
        self.scaled = torch.empty(max_rows if scaled else 0, vocab_size, dtype=torch.float32, device=device)
        """Logits divided by temperature, of filtered rows."""
        self.maxima = torch.empty(shares, dtype=torch.float32, device=device)
        self.minima = torch.empty(shares, dtype=torch.float32, device=device)
        """Smallest finite value of each share."""
        self.best_scores = torch.empty(shares, dtype=torch.float32, device=device)
        self.best_ids = torch.empty(shares, dtype=torch.int32, device=device)
        self.num_done = torch.zeros(max_rows, dtype=torch.int32, device=device) if chooses else None
        """Programs that have finished their share of each row; all zero between calls."""
        sums = NUM_PASSES, searched, NUM_BINS.value
        self.numbers = torch.empty(sums, dtype=torch.int32, device=device)
        """[pass, share of a row, threshold]: number of tokens that reach the threshold."""
        self.weights = torch.empty(sums, dtype=torch.float32, device=device)
        """Sum of their weights, rounded."""
        listing = max_rows if scaled else 0
        self.spans = torch.empty(NUM_PASSES + 1, listing, SPAN_FIELDS.value, dtype=torch.float32, device=device)
        """[pass, row, field]: scores that contain the row's edges."""
        self.listed = torch.empty(listing, _LISTED, dtype=torch.float32, device=device)
        """Logits divided by temperature that lie in the last span, with ids `listed_ids`; the first `num_listed` of
        each row are valid."""
        self.listed_ids = torch.empty(listing, _LISTED, dtype=torch.int32, device=device)
        self.num_listed = torch.empty(listing, dtype=torch.int32, device=device)
        self.masses = torch.empty(3, searched, dtype=torch.int64, device=device)
        """[sum, share of a row]: mass of all tokens; mass, and number, of tokens above the last span."""
        self.edges = torch.empty(listing, 2, dtype=torch.int64, device=device)
        """[row, field]: lowest kept key, and the last removed id among tokens with this key, or -1."""


class Rows(NamedTuple):
    """Sampling parameters by slot, each a contiguous column; `positions` and `slots` are by row, [num_rows]."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    positions: Tensor
    slots: Tensor | None
    """None if the parameters are by row too."""


def rows_of(*columns: Tensor, slots: Tensor | None = None) -> Rows:
    """Makes columns, in the order of `Rows`, contiguous."""
    return Rows(*(column.contiguous() for column in columns), None if slots is None else slots.contiguous())


@triton.jit
def slot_of(slots, row):
    """Index of a row's sampling parameters."""
    slot = row
    if slots is not None:
        slot = tl.load(slots + row)
    return slot


class Shares(NamedTuple):
    """Division of each row among programs."""

    num_splits: int
    most_splits: int
    """Power of two that `num_splits` never exceeds for this vocabulary. Kernels are compiled for this maximum, not for
    each number."""
    length: int
    """Tokens of one program, a multiple of both tiles."""
    tile: int
    """Tokens that a program handles at a time."""
    search_tile: int
    """Tokens that a program handles at a time while searching, with NUM_BINS values per token."""


def share_rows(num_rows: int, vocab_size: int) -> Shares:
    """Divides rows of `vocab_size` tokens among as many programs as fill the device."""
    num_tiles = triton.cdiv(vocab_size, _TILE)
    splits = min(num_tiles, max(_NUM_PROGRAMS // num_rows, 1), _MAX_SPLITS)
    tiles = triton.cdiv(num_tiles, splits)
    most = triton.next_power_of_2(min(num_tiles, _MAX_SPLITS))
    return Shares(triton.cdiv(num_tiles, tiles), most, tiles * _TILE, _TILE, _SEARCH_TILE)
