"""What a launch of the attention kernel chooses: splits of the context and tiles of the rows."""

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels.attention.splits import MAX_SPLITS, choose_num_splits
from wingbeat.kernels.attention.tiles import tile_config


@pytest.mark.parametrize("device_programs", [1, 132, 396])
def test_splits_fill_the_device_and_no_more(device_programs):
    for num_programs in (1, 8, 100, 128, 5000):
        for num_tiles in (1, 2, 9, 128, 4096):
            splits = choose_num_splits(num_programs, num_tiles, device_programs)
            most = min(max(num_tiles // 2, 1), MAX_SPLITS)
            assert 1 <= splits <= most
            assert num_programs * splits >= 0.68 * min(device_programs, num_programs * most)
            assert splits == 1 or num_programs < device_programs


def test_one_request_fills_the_device():
    """Llama-3.1-8B at batch 1 and 8k context: 8 KV heads, on the 132 multiprocessors of an H200."""
    config = tile_config(torch.bfloat16, 128, 4)
    programs = 132 * config.programs_per_sm
    splits = choose_num_splits(8, 8192 // config.block_keys, programs)
    assert 0.8 * programs <= 8 * splits <= programs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim_has_a_tile_for_any_number_of_rows(head_dim, dtype):
    heights = [tile_config(dtype, head_dim, rows).block_rows for rows in range(1, 300)]
    assert heights == sorted(heights)
    largest = heights[-1]
    assert all(rows <= height < max(2 * rows, 17) or height == largest for rows, height in enumerate(heights, start=1))
