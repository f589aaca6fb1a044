"""Addresses of a pool's layers, for a kernel that moves rows in all layers."""

from typing import NamedTuple

from torch import Tensor


class PoolTable(NamedTuple):
    """Addresses and row sizes of every layer's key and value cache."""

    entries: Tensor
    """int64 [2 * num_layers, 2]: address of each cache, and number of words in a row."""
    word_bytes: int
    """Bytes of a word: the largest of 8, 4, 2 and 1 that divides every address and row size."""
    most_words: int
    """Number of words in the longest row."""
    aligned: bool
    """Whether every address and row size is a multiple of 16 bytes."""
