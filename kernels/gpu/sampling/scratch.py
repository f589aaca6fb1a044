"""Parameters, division among programs and scratch memory of the sampling kernels' rows."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A float's 32 bits are searched in 8 digits of 4 bits, because a program can hold 16 bins per lane in registers.
DIGIT_BITS = tl.constexpr(4)
NUM_BINS = tl.constexpr(16)
NUM_DIGITS = tl.constexpr(8)

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
        self.best_scores = torch.empty(shares, dtype=torch.float32, device=device)
        self.best_ids = torch.empty(shares, dtype=torch.int32, device=device)
        self.num_done = torch.zeros(max_rows, dtype=torch.int32, device=device) if chooses else None
        """Programs that have finished their share of each row; all zero between calls."""
        self.bins = torch.empty(2, NUM_DIGITS.value, searched, NUM_BINS.value, dtype=torch.int64, device=device)
        """[search, digit, share of a row, bin]: number (search 0) or mass (search 1) of tokens."""
        self.states = torch.empty(2, NUM_DIGITS.value, max_rows, 3, dtype=torch.int64, device=device)
        """[search, digit, row, field]: results of the digits before this digit."""
        listing = max_rows if scaled else 0
        self.listed = torch.empty(listing, _LISTED, dtype=torch.float32, device=device)
        """Logits divided by temperature that top-p may keep, with ids `listed_ids`; the first `counts` of each row are
        valid."""
        self.listed_ids = torch.empty(listing, _LISTED, dtype=torch.int32, device=device)
        self.counts = torch.empty(listing, dtype=torch.int32, device=device)
        self.masses = torch.empty(searched, dtype=torch.int64, device=device)
        self.edges = torch.empty(listing, 2, dtype=torch.int64, device=device)
        """[row, field]: lowest kept key, or -1 if `filter` must search this key; and the last removed id among tokens
        with this key, or -1."""


class Rows(NamedTuple):
    """Sampling parameters by row, [num_rows] each and contiguous."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    positions: Tensor


def rows_of(*columns: Tensor) -> Rows:
    """Makes columns [num_rows], in the order of `Rows`, contiguous."""
    return Rows(*(column.contiguous() for column in columns))


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
