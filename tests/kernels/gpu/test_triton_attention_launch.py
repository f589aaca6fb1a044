"""Choices of an attention launch under the GPU's limits: splits of the context and tiles of rows."""

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels.gpu.attention.device import KNOWN
from wingbeat.kernels.gpu.attention.launch import partial_bytes
from wingbeat.kernels.gpu.attention.splits import (
    MAX_SPLITS,
    MOST_BYTES,
    choose_num_splits,
    choose_splits,
    merged_heads,
    split_size,
)
from wingbeat.kernels.gpu.attention.tiles import TileConfig, device_tiles, tile_config

LOW, HIGH = TileConfig(16, 64, 4, 5, 0), TileConfig(128, 64, 8, 5, 0)


@pytest.mark.parametrize("device_programs", [1, 58, 132, 396])
def test_splits_of_one_request_fill_the_device_and_no_more(device_programs):
    for num_programs in (1, 8, 100, 128, 5000):
        splits = choose_num_splits(num_programs, device_programs)
        assert 1 <= splits <= MAX_SPLITS
        assert num_programs * splits >= 0.68 * min(device_programs, num_programs * MAX_SPLITS)
        assert splits == 1 or num_programs < device_programs


def test_one_request_of_llama_fills_the_device():
    """Llama-3.1-8B at batch 1 and 8k context: 8 KV heads, two programs on each of 132 multiprocessors."""
    splits = choose_splits(1, 8, 264, LOW)
    assert 0.8 * 264 <= 8 * splits.at_most(8192) <= 264


def test_splits_are_long_where_many_requests_fill_the_device_and_short_where_one_does():
    """They are whole tiles, alike for all numbers of requests that one captured round serves."""
    keys = {num_reqs: choose_splits(num_reqs, 8, 264, LOW).least_keys for num_reqs in (1, 4, 16, 17, 31, 32, 128)}
    assert keys == {1: 128, 4: 256, 16: 1024, 17: 1984, 31: 1984, 32: 1984, 128: 2048}
    assert choose_splits(128, 8, 264, LOW).at_most(2048) == 1
    assert choose_splits(128, 8, 264, LOW).at_most(2049) == 2


def test_splits_of_high_tiles_are_twice_as_long_where_the_batch_fills_the_device_twice():
    """Pieces of prompts, each a tile of 128 rows of Llama-3.1-8B: a round of 2,048 tokens at a context of 32k writes 8
    results a row where it wrote 16."""
    keys = {num_reqs: choose_splits(num_reqs, 8, 132, HIGH).least_keys for num_reqs in (1, 8, 16, 32, 64, 128)}
    assert keys == {1: 128, 8: 1024, 16: 1984, 32: 3968, 64: 4096, 128: 4096}
    assert choose_splits(64, 8, 132, HIGH).at_most(32768) == 8


@pytest.mark.parametrize(("num_rows", "num_heads"), [(1, 32), (512, 32), (1024, 32), (100_000, 32), (7, 1)])
def test_a_merge_has_programs_enough_and_no_more(num_rows, num_heads):
    heads = merged_heads(num_rows, num_heads)
    assert 1 <= heads <= num_heads
    assert num_rows * -(-num_heads // heads) <= max(2 * 4096, num_rows)
    assert heads == 1 or num_rows * -(-num_heads // heads) >= 4096


@pytest.mark.few(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("gpu", KNOWN)
def test_every_head_dim_has_a_tile_on_every_gpu_for_any_number_of_rows(head_dim, dtype, gpu):
    limits = KNOWN[gpu]
    configs = [tile_config(dtype, head_dim, rows, limits) for rows in range(1, 300)]
    heights = [config.block_rows for config in configs]
    assert heights == sorted(heights)
    largest = heights[-1]
    assert all(rows <= height < max(2 * rows, 17) or height == largest for rows, height in enumerate(heights, start=1))
    assert max(config.shared_bytes for config in configs) <= limits.shared_bytes


def test_a_gpu_of_less_memory_has_lower_tiles_or_says_what_it_lacks():
    small = KNOWN["L4"]._replace(shared_bytes=64 * 1024)
    assert [tile.block_rows for tile in device_tiles(torch.bfloat16, 128, small)] == [64]
    with pytest.raises(ValueError, match=r"head dim 256 in torch.bfloat16 takes 73728 bytes.* has 65536"):
        device_tiles(torch.bfloat16, 256, small)


def test_programs_of_a_multiprocessor_are_limited_by_what_runs_out_first():
    """CUDA's occupancy rules: shared memory with 1 KiB of its own each, registers in eights, threads."""
    h100, l4 = KNOWN["H100"], KNOWN["L4"]
    assert h100.resident_programs(72_704, 128, 4) == 3
    assert l4.resident_programs(72_704, 128, 4) == 1
    assert h100.resident_programs(0, 255, 8) == 1
    assert h100.resident_programs(0, 168, 4) == 3
    assert h100.resident_programs(0, 32, 8) == 8
    assert l4.resident_programs(0, 32, 8) == 6
    assert h100.resident_programs(0, 32, 8, tensor_columns=256) == 2
    assert h100.resident_programs(227 * 1024, 32, 4) == 1


def test_memory_of_splits_is_foreseen_for_the_longest_contexts():
    """32 requests of Llama-3.1-8B in trees of 16 nodes: 64 rows in a tile, two programs on a multiprocessor."""
    shape = (torch.bfloat16, (32, 16), (32, 8), (128, 128))
    assert partial_bytes(*shape, 512, KNOWN["H100"]) == 0
    assert partial_bytes(*shape, 8192, KNOWN["H100"]) == 5 * 32 * 16 * 32 * 129 * 4
    assert partial_bytes(*shape, 131072, KNOWN["H100"]) > partial_bytes(*shape, 8192, KNOWN["H100"])
    assert partial_bytes(*shape, 131072, KNOWN["L4"]) < partial_bytes(*shape, 131072, KNOWN["H100"])


LLAMA = (torch.bfloat16, (32, 8), (128, 128))
SPLIT_MIB = {
    (1, 8): (4, 4),
    (64, 1): (4, 43),
    (64, 8): (32, 234),
    (34, 60): (64, 128),
    (128, 16): (129, 226),
    (256, 8): (129, 226),
    (64, 32): (64, 226),
    (312, 32): (0, 0),
}
"""MiB of split results of Llama-3.1-8B on an H100 by requests and rows, with contexts of 8k and of 128k. The last two
rows are a round of 2,048 prompt tokens, and the largest round of prompts of 256 sequences. Without the limit, the
second numbers of the last five rows were 257, 935, 935, 484 and 2358, and the first 629 in the last row."""


@pytest.mark.parametrize("rows", SPLIT_MIB, ids=str)
def test_memory_of_splits_is_bounded_and_as_documented(rows):
    dtype, heads, dims = LLAMA
    sizes = [partial_bytes(dtype, rows, heads, dims, keys, KNOWN["H100"]) for keys in (8192, 131072)]
    assert tuple(round(size / 2**20) for size in sizes) == SPLIT_MIB[rows]


@pytest.mark.parametrize("gpu", KNOWN)
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (128, 128), (16, 1)], ids=str)
def test_no_batch_and_no_length_takes_more_and_the_bound_leaves_splits_that_fill_the_device(gpu, heads):
    limits = KNOWN[gpu]
    for num_reqs, num_query in ((1, 1), (1, 2048), (3, 60), (17, 8), (256, 8), (1024, 64), (4096, 32)):
        for dim in (64, 256):
            rows = heads[0] // heads[1] * num_query
            size = partial_bytes(torch.bfloat16, (num_reqs, num_query), heads, (dim, dim), 1 << 22, limits)
            assert size <= MOST_BYTES
            tile = tile_config(torch.bfloat16, dim, rows, limits)
            programs, at_once = -(-rows // tile.block_rows) * heads[1], limits.num_sms * 3
            split_bytes = 4 * split_size(num_query, heads[0], dim)
            most = choose_splits(num_reqs, programs, at_once, tile, split_bytes).most
            assert most * num_reqs * programs >= 0.6 * min(at_once, num_reqs * programs * MAX_SPLITS)
