"""Packed trees attend as padded ones do."""

import pytest
import torch

from wingbeat.kernels.attention import tile_queries, untile
from wingbeat.runtime.attention import AttentionSegment, attend_segments, build_segment
from wingbeat.runtime.packing import pack, packed, rows_of

BLOCK_SIZE, NUM_BLOCKS, DIM = 4, 12, 8


def real_nodes(sizes, num_nodes):
    return torch.arange(num_nodes) < torch.tensor(sizes)[:, None]


def test_little_padding_is_left_where_it_is():
    assert pack(real_nodes([7, 8], 8)) is None
    assert pack(real_nodes([8, 8], 8)) is None
    assert pack(real_nodes([2, 8], 8)) is not None


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("head_major", [True, False], ids=["by head", "by row"])
def test_tiles_hold_the_padded_queries(num_heads, num_kv_heads, head_major):
    generator = torch.Generator().manual_seed(1)
    real = real_nodes([1, 5, 2], 6)
    packing = pack(real)
    num_rows = int(real.sum())
    query = torch.randn(num_heads, num_rows, DIM, generator=generator).transpose(0, 1)
    padded = torch.zeros(*real.shape, num_heads, DIM)
    padded[real] = query
    tiles = packing.tile(query if head_major else query.contiguous(), num_kv_heads)
    assert tiles.shape == (3, num_kv_heads, num_heads // num_kv_heads * 6, DIM)
    assert torch.equal(untile(tiles, 6)[real], query)
    assert torch.equal(tile_queries(untile(tiles, 6), num_kv_heads), tiles)
    assert torch.equal(packing.untile(tile_queries(padded, num_kv_heads)), query)


@pytest.mark.parametrize("window", [0, 3])
def test_attention_of_packed_rows_is_that_of_padded_ones(window):
    generator = torch.Generator().manual_seed(2)
    sizes, num_nodes, num_heads = [6, 1, 2], 6, 6
    real = real_nodes(sizes, num_nodes)
    packing = pack(real)
    context = torch.tensor([3, 9, 0])
    tables = torch.randperm(NUM_BLOCKS - 1, generator=generator)[: 3 * 3].view(3, 3) + 1
    caches = [torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, DIM, generator=generator) for _ in range(2)]
    positions = context[:, None] + torch.arange(num_nodes)
    padded = build_segment(0, positions, context, None, tables, BLOCK_SIZE, (0, 3), torch.float32)
    query = torch.randn(3, num_nodes, num_heads, DIM, generator=generator)
    packed = attend_segments(query[real], *caches, [padded._replace(packing=packing)], 0.3, sliding_window=window)
    expected = attend_segments(query.flatten(0, 1), *caches, [padded], 0.3, sliding_window=window)
    assert torch.equal(packed, expected.view(3, num_nodes, num_heads, DIM)[real])
    beside = build_segment(
        len(packed), torch.tensor([[2]]), torch.tensor([2]), None, tables[:1], BLOCK_SIZE, (0, 3), torch.float32
    )
    last = torch.randn(1, num_heads, DIM, generator=generator)
    both = attend_segments(
        torch.cat([query[real], last]), *caches, [padded._replace(packing=packing), beside], 0.3, sliding_window=window
    )
    assert torch.equal(both[:-1], packed)


def test_a_layer_of_other_heads_has_tiles_of_its_own():
    packing = pack(real_nodes([1, 4], 4))
    for num_heads in (4, 8, 4):
        query = torch.randn(5, num_heads, DIM)
        assert torch.equal(packing.untile(packing.tile(query, 2)), query)


def test_masks_of_tiles_are_made_once_for_each_window_and_group():
    positions = torch.arange(3)[None]
    segment = build_segment(
        0, positions, torch.zeros(1, dtype=torch.int64), None, torch.tensor([[1]]), BLOCK_SIZE, (0, 2), torch.float32
    )
    assert segment.tile_mask(0, 2) is segment.tile_mask(0, 2)
    assert segment.tile_mask(0, 2).shape == (1, 1, 6, BLOCK_SIZE)
    assert segment.tile_mask(0, 4).shape == (1, 1, 12, BLOCK_SIZE)
    assert not torch.equal(segment.tile_mask(0, 2), segment.tile_mask(2, 2))
    for node in range(3):
        assert torch.equal(segment.tile_mask(2, 2)[0, 0, 3 + node], segment.masks[2][0, node]), "head by head"
    assert AttentionSegment(0, 1, 1, torch.tensor([[1]]), {0: None}).tile_mask(0, 2) is None


def test_rows_are_found_again():
    for sizes in ([1, 5, 2], [6, 6, 6]):
        real = real_nodes(sizes, 6)
        packing = pack(real)
        padded = torch.arange(18).view(3, 6) * 10
        nodes = torch.tensor([[0, 0], [4, 1], [1, 0]])
        assert torch.equal(packed(padded, packing)[rows_of(nodes, 6, packing)], padded.gather(1, nodes))
