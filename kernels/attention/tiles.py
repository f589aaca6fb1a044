"""Tiles of the attention kernel: which sizes and launch options a dtype, a head dim and a number of rows get."""

from typing import NamedTuple

import torch
import triton


class TileConfig(NamedTuple):
    """Launch parameters of the attention kernel."""

    block_rows: int
    """Query rows (group * nodes) of a tile."""
    block_keys: int
    """Keys per iteration; a power of two, at least 16."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs a multiprocessor holds at once by shared memory and registers; sizes the split of the context."""


# By (bytes of an element, padded head dim): one entry per tile height. From 64 rows on Hopper's wgmma applies, which
# works in groups of four warps and 64 rows; below, tiles are read faster than they are computed, and several programs
# share a multiprocessor. Of the stages, every second one prefetches keys and values: the block ids come first.
TILE_CONFIGS: dict[tuple[int, int], tuple[TileConfig, ...]] = {
    (2, 64): (
        TileConfig(16, 128, 4, 5, 3),
        TileConfig(32, 128, 4, 5, 3),
        TileConfig(64, 128, 4, 3, 2),
        TileConfig(128, 128, 8, 5, 1),
    ),
    (2, 128): (
        TileConfig(16, 64, 4, 5, 3),
        TileConfig(32, 64, 4, 5, 2),
        TileConfig(64, 64, 4, 3, 2),
        TileConfig(128, 64, 8, 5, 1),
    ),
    (2, 256): (
        TileConfig(16, 32, 4, 5, 2),
        TileConfig(32, 32, 4, 5, 2),
        TileConfig(64, 32, 4, 3, 1),
        TileConfig(128, 32, 8, 3, 1),
    ),
    (4, 64): (TileConfig(16, 32, 4, 3, 2), TileConfig(32, 32, 4, 3, 2), TileConfig(64, 32, 8, 3, 1)),
    (4, 128): (TileConfig(16, 32, 4, 3, 2), TileConfig(32, 32, 8, 3, 1)),
    (4, 256): (TileConfig(16, 16, 4, 3, 2), TileConfig(32, 16, 8, 3, 1)),
}


def tile_config(dtype: torch.dtype, head_dim: int, num_rows: int) -> TileConfig:
    """The smallest tile of the table that holds `num_rows` = group * num_query rows, else the largest.

    Args:
        dtype: of the query.
        head_dim: larger of key_dim and value_dim.
    """
    padded = max(64, triton.next_power_of_2(head_dim))
    configs = TILE_CONFIGS[dtype.itemsize, padded]
    return next((config for config in configs if config.block_rows >= num_rows), configs[-1])
