"""Each GPU's own tiles, executed as compiled for it, against the softmax formula."""

import pytest
import torch

from tests.kernels.attention_cases import NAN, Case, assert_close, build, by_formula

pytest.importorskip("triton")

from wingbeat.kernels.gpu.attention import launch as triton_attention
from wingbeat.kernels.gpu.attention.device import KNOWN, DeviceLimits
from wingbeat.kernels.gpu.attention.splits import Splits
from wingbeat.kernels.gpu.attention.tiles import TileConfig, device_tiles

BF16 = torch.bfloat16
EVERY = [(dtype, dim) for dtype in (BF16, torch.float32) for dim in (64, 128, 256, 576)]
"""Keys of 576 elements begin with their values of 512."""


def limits_of(capability: int) -> DeviceLimits:
    """Limits of the first known GPU of that capability."""
    return next(limits for limits in KNOWN.values() if limits.capability == capability)


@pytest.fixture(scope="session")
def limits(request: pytest.FixtureRequest) -> DeviceLimits:
    """Limits of the GPU whose instructions are executed (`--ptx`)."""
    capability = request.config.getoption("--ptx")
    if capability is None:
        pytest.skip("needs --ptx: the interpreter knows no tiles")
    return limits_of(capability)


def check(config: TileConfig, dtype: torch.dtype, dim: int, mask: str, fp8: bool = False) -> None:
    """Check a tile split and unsplit, with more rows than the tile: covers tensor cores, prefetching and swizzles."""
    shape = {"heads": (2, 1), "dims": (dim, min(dim, 512)), "block_size": 16, "mask": mask, "dtype": dtype, "fp8": fp8}
    shape["in_keys"] = dim > 512
    inputs = build(Case((150, 33), num_query=config.block_rows // 2 + 3, **shape), NAN)
    expected = by_formula(inputs)
    for most in (1, 2):
        out = torch.full_like(inputs.arguments[0], NAN)[..., : min(dim, 512)]
        splits = Splits(most, config.block_keys)
        triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, config=config, splits=splits)
        assert_close(out, expected)


def test_a_tile_of_the_device_is_the_formula_as_compiled(limits):
    """Head dim 128 in 16 rows, that of plain decodes."""
    check(device_tiles(BF16, 128, limits)[0], BF16, 128, "tree")


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["tree", "causal"])
@pytest.mark.parametrize("height", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "dim"), EVERY, ids=str)
def test_every_tile_of_the_device_is_the_formula_as_compiled(limits, dtype, dim, height, mask):
    tiles = device_tiles(dtype, dim, limits)
    if height >= len(tiles):
        pytest.skip(f"{len(tiles)} heights")
    check(tiles[height], dtype, dim, mask)
