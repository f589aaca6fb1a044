"""Rows of a call of the sampling kernels, the programs that share them, and memory that stays in place."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A float's 32 bits are searched in 8 digits of 4; 16 bins are what a program can hold in registers for each lane.
DIGIT_BITS = tl.constexpr(4)
NUM_BINS = tl.constexpr(16)
NUM_DIGITS = tl.constexpr(8)

# Tokens a program handles at a time, for one value and for NUM_BINS values per token; both divide a program's share.
_TILE = 1024
_SEARCH_TILE = 512
# Programs that fill a large GPU twice, and the most that share a row (each reads what all of them found).
_NUM_PROGRAMS = 264
_MAX_SPLITS = 128
_LISTED = 2048
"""Tokens of a row that are listed at most, a power of two: as many as a program searches in registers."""


class SamplingWorkspace:
    """Memory of `choose_tokens` at addresses that never change. Holds nothing between calls.

    Args:
        max_rows: most rows of a call, at least 1.
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
        """Logits over temperature of filtered rows."""
        self.maxima = torch.empty(shares, dtype=torch.float32, device=device)
        self.best_scores = torch.empty(shares, dtype=torch.float32, device=device)
        self.best_ids = torch.empty(shares, dtype=torch.int32, device=device)
        self.num_done = torch.zeros(max_rows, dtype=torch.int32, device=device) if chooses else None
        """Zeros between calls: programs that are done with their share of a row."""
        self.bins = torch.empty(2, NUM_DIGITS.value, searched, NUM_BINS.value, dtype=torch.int64, device=device)
        """[search, digit, share of a row, bin]: tokens (search 0) or mass (search 1)."""
        self.states = torch.empty(2, NUM_DIGITS.value, max_rows, 3, dtype=torch.int64, device=device)
        """[search, digit, row, field]: what was known before the digit was searched."""
        listing = max_rows if scaled else 0
        self.listed = torch.empty(listing, _LISTED, dtype=torch.float32, device=device)
        """Logits over temperature that top-p may keep, of ids `listed_ids`; of each row the first `counts`."""
        self.listed_ids = torch.empty(listing, _LISTED, dtype=torch.int32, device=device)
        self.counts = torch.empty(listing, dtype=torch.int32, device=device)
        self.masses = torch.empty(searched, dtype=torch.int64, device=device)
        self.edges = torch.empty(listing, 2, dtype=torch.int64, device=device)
        """Lowest key that is kept, -1 where it is searched for; of equal ones the last id that is removed, or -1."""


class Rows(NamedTuple):
    """Parameters of the rows, [num_rows] each and contiguous."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    positions: Tensor


def rows_of(*columns: Tensor) -> Rows:
    """Columns of [num_rows] in the order of `Rows`, made contiguous."""
    return Rows(*(column.contiguous() for column in columns))


class Shares(NamedTuple):
    """Shares of a row, by program."""

    num_splits: int
    most_splits: int
    """A power of two that no number of rows takes `num_splits` above: kernels are compiled for it, not for each."""
    length: int
    """Tokens of one program, a multiple of both tiles."""
    tile: int
    """Tokens a program handles at a time."""
    search_tile: int
    """Likewise while it searches, with NUM_BINS values per token."""


def share_rows(num_rows: int, vocab_size: int) -> Shares:
    """Divide rows of `vocab_size` tokens among as many programs as fill the device."""
    num_tiles = triton.cdiv(vocab_size, _TILE)
    splits = min(num_tiles, max(_NUM_PROGRAMS // num_rows, 1), _MAX_SPLITS)
    tiles = triton.cdiv(num_tiles, splits)
    most = triton.next_power_of_2(min(num_tiles, _MAX_SPLITS))
    return Shares(triton.cdiv(num_tiles, tiles), most, tiles * _TILE, _TILE, _SEARCH_TILE)
