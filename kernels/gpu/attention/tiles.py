"""Tile sizes and launch options of the attention kernel, by dtype, head dimension, number of rows and GPU."""

import functools
from typing import NamedTuple

import torch
import triton

from wingbeat.kernels.gpu.attention.device import KNOWN, DeviceLimits


class TileConfig(NamedTuple):
    """Launch parameters of the attention kernel."""

    block_rows: int
    """Query rows (group * nodes) of a tile."""
    block_keys: int
    """Keys per iteration; a power of two, at least 16."""
    num_warps: int
    num_stages: int
    shared_bytes: int
    """Maximum bytes of shared memory over all compiled variants."""


_Tiles = dict[tuple[int, int], tuple[TileConfig, ...]]

# The keys of these tables are (bytes of an element, padded head dim); each value has one entry per tile height. At 512
# the values lie in the keys, which are read once for both products. Below
# 64 rows reading a tile takes less time than computing it, and several programs share a multiprocessor. Every second
# pipeline stage prefetches keys and values, because the block ids must be loaded first. float32 uses no tensor cores,
# and its operands are in registers, so its tiles are small.
_FLOAT32: _Tiles = {
    (4, 64): (TileConfig(16, 32, 4, 3, 23_040), TileConfig(32, 32, 8, 3, 29_184)),
    (4, 128): (TileConfig(16, 16, 8, 3, 26_112),),
    (4, 256): (TileConfig(16, 16, 8, 1, 34_816),),
    (4, 512): (TileConfig(16, 16, 8, 1, 73_728),),
}
# From 64 rows on, matrix products run on groups of four warps, 64 rows at a time. Their accumulators are spread over
# more registers or are in tensor memory. There are no tiles of 256 rows: at dim 128 a thread spills 200 bytes with 16
# warps and 256 bytes with 8 (9.0), or 48 and 40 bytes with half the keys; the second tile of 128 rows finds its keys in
# the L2 cache; and batches with two tiles are bound by computation (8 sequences with 60 nodes and 8192 keys each run at
# 250 TFLOP/s on an H100).
WARPGROUP_TILES: _Tiles = _FLOAT32 | {
    (2, 64): (
        TileConfig(16, 128, 4, 5, 75_776),
        TileConfig(32, 128, 4, 5, 81_920),
        TileConfig(64, 128, 4, 3, 77_824),
        TileConfig(128, 128, 8, 5, 120_832),
    ),
    (2, 128): (
        TileConfig(16, 64, 4, 5, 75_776),
        TileConfig(32, 64, 4, 5, 81_920),
        TileConfig(64, 64, 4, 3, 86_016),
        TileConfig(128, 64, 8, 5, 136_192),
    ),
    (2, 256): (
        TileConfig(16, 32, 4, 5, 77_824),
        TileConfig(32, 32, 4, 5, 86_016),
        TileConfig(64, 32, 4, 3, 108_544),
        TileConfig(128, 32, 8, 3, 174_080),
    ),
    # With warpgroups, 64 rows spill 400 to 1,040 bytes.
    (2, 512): (TileConfig(16, 32, 4, 3, 83_968), TileConfig(32, 32, 8, 3, 102_400)),
}
# On other GPUs a warp's own registers hold its rows' accumulators, and most GPUs give a program 99 KiB of shared
# memory.
WARP_TILES: _Tiles = _FLOAT32 | {
    (2, 64): (
        TileConfig(16, 128, 4, 5, 75_776),
        TileConfig(32, 128, 4, 5, 81_920),
        TileConfig(64, 128, 4, 3, 45_056),
        TileConfig(128, 128, 8, 5, 86_016),
    ),
    (2, 128): (
        TileConfig(16, 64, 4, 5, 75_776),
        TileConfig(32, 64, 4, 5, 81_920),
        TileConfig(64, 64, 8, 3, 61_440),
        TileConfig(128, 64, 8, 3, 69_632),
    ),
    (2, 256): (
        TileConfig(16, 32, 4, 5, 77_824),
        TileConfig(32, 32, 4, 5, 86_016),
        TileConfig(64, 32, 8, 3, 73_728),
    ),
    (2, 512): (
        TileConfig(16, 32, 4, 3, 83_968),
        TileConfig(32, 32, 8, 3, 102_400),
        TileConfig(64, 32, 8, 3, 139_264),
    ),
}


@functools.cache
def device_tiles(dtype: torch.dtype, head_dim: int, limits: DeviceLimits) -> tuple[TileConfig, ...]:
    """Returns the tiles of a dtype and head dimension that fit into this GPU's shared memory, by ascending height.

    Args:
        dtype: dtype of the query.
        head_dim: larger of key_dim and value_dim, at most 256; with values that lie in keys, a key's dimension.

    Raises:
        ValueError: no tile fits; the message states the memory needed.
    """
    padded = min(max(64, triton.next_power_of_2(head_dim)), 512)
    table = WARPGROUP_TILES if limits.has_warpgroups else WARP_TILES
    configs = table[dtype.itemsize, padded]
    fitting = tuple(config for config in configs if config.shared_bytes <= limits.shared_bytes)
    if not fitting:
        raise ValueError(
            f"head dim {head_dim} in {dtype} takes {min(config.shared_bytes for config in configs)} bytes of shared "
            f"memory: a program of this GPU has {limits.shared_bytes}"
        )
    return fitting


def tile_config(dtype: torch.dtype, head_dim: int, num_rows: int, limits: DeviceLimits = KNOWN["H100"]) -> TileConfig:
    """Returns the smallest of `device_tiles` that holds `num_rows` = group * num_query rows, else the largest."""
    configs = device_tiles(dtype, head_dim, limits)
    return next((config for config in configs if config.block_rows >= num_rows), configs[-1])


def fixed_tile(dtype: torch.dtype, head_dim: int, limits: DeviceLimits = KNOWN["H100"]) -> TileConfig:
    """Returns the tile for batch-invariant rows, which does not depend on the number of rows.

    The tile has at most 32 rows, so that each matrix product runs on one warp, with one kind of instruction.
    """
    config = [config for config in device_tiles(dtype, head_dim, limits) if config.block_rows <= 32][-1]
    return config._replace(block_keys=min(config.block_keys, 64))
