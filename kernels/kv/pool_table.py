"""Where the layers of a pool lie, for moves over all of them."""

from typing import NamedTuple

from torch import Tensor


class PoolTable(NamedTuple):
    """Where the rows of every layer's keys and values lie, for a kernel that visits all layers."""

    entries: Tensor
    """int64 [2 * num_layers, 2]: address of the cache, and words of a row."""
    word_bytes: int
    """Largest of 8, 4, 2 and 1 that divides every address and row."""
    most_words: int
    """Words of the longest row."""
    aligned: bool
    """Whether every address and row is a multiple of 16 bytes."""
