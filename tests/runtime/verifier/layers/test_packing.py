"""Packed trees attend as padded ones do."""

import pytest
import torch

from wingbeat.kernels.attention.reference import tile_queries, untile
from wingbeat.runtime.verifier.layers.attention import AttentionSegment, attend_segments, build_segment
from wingbeat.runtime.verifier.layers.packing import best_split, pack, packed, rows_of

pytestmark = pytest.mark.few(3)

BLOCK_SIZE, DIM = 4, 8


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
    real = real_nodes([1, 5, 2], 6)[:, :5]
    (group,) = pack(real).groups
    query = torch.randn(num_heads, int(real.sum()), DIM, generator=generator).transpose(0, 1)
    padded = torch.zeros(*real.shape, num_heads, DIM)
    padded[real] = query
    tiles = group.tiles.tile(query if head_major else query.contiguous(), num_kv_heads)
    assert tiles.shape == (3, num_kv_heads, num_heads // num_kv_heads * 5, DIM)
    assert torch.equal(untile(tiles, 5)[real], query)
    assert torch.equal(tile_queries(untile(tiles, 5), num_kv_heads), tiles)
    assert torch.equal(group.tiles.untile(tile_queries(padded, num_kv_heads)), query)


def test_a_layer_of_other_heads_has_tiles_of_its_own():
    (group,) = pack(real_nodes([1, 4], 4)).groups
    for num_heads in (4, 8, 4):
        query = torch.randn(5, num_heads, DIM)
        assert torch.equal(group.tiles.untile(group.tiles.tile(query, 2)), query)


@pytest.mark.parametrize(
    ("lens", "split"),
    [
        ([6, 1, 2], None),
        ([8] * 16, None),
        ([8] + [2] * 8, 2),
        ([8] * 8 + [2] * 3, None),
        ([8, 7] + [1] * 10 + [3] * 10, 3),
    ],
)
def test_many_small_trees_are_padded_apart(lens, split):
    assert best_split(lens) == split
    packing = pack(real_nodes(lens, max(lens)))
    if packing is not None:
        assert len(packing.groups) == (1 if split is None else 2)


SIZES = [[6, 1, 2], [1, 7, *[1] * 8, 7], [1, 7, *[2, 1] * 5, 6]]


def world(sizes):
    """Queries of padded trees, caches with a context for each, block tables, and the contexts' lengths."""
    generator = torch.Generator().manual_seed(2)
    num_reqs, num_nodes = len(sizes), max(sizes)
    context = torch.randint(0, 7, (num_reqs,), generator=generator)
    width = -(-(6 + num_nodes) // BLOCK_SIZE)
    tables = torch.randperm(num_reqs * width, generator=generator).view(num_reqs, width) + 1
    caches = [torch.randn(num_reqs * width + 1, BLOCK_SIZE, 2, DIM, generator=generator) for _ in range(2)]
    query = torch.randn(num_reqs, num_nodes, 6, DIM, generator=generator)
    return query, caches, tables, context


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("window", [0, 3])
def test_attention_of_packed_rows_is_that_of_padded_ones(sizes, window):
    query, caches, tables, context = world(sizes)
    real = real_nodes(sizes, max(sizes))
    packing = pack(real)
    assert len(packing.groups) == (1 if len(sizes) == 3 else 2)

    def segment(start, seqs, num_nodes):
        positions = context[seqs, None] + torch.arange(num_nodes)
        return build_segment(start, positions, context[seqs], None, tables[seqs], BLOCK_SIZE, (0, 3), torch.float32)

    segments = [segment(g.start, g.seqs, g.num_nodes)._replace(tiles=g.tiles) for g in packing.groups]
    out = attend_segments(packed(query, packing), *caches, segments, 0.3, sliding_window=window)
    whole = segment(0, torch.arange(len(sizes)), max(sizes))
    expected = attend_segments(query.flatten(0, 1), *caches, [whole], 0.3, sliding_window=window)
    torch.testing.assert_close(out, packed(expected.view(query.shape), packing))
    beside = whole._replace(start=len(out))
    both = attend_segments(
        torch.cat([packed(query, packing), query.flatten(0, 1)]), *caches, [*segments, beside], 0.3,
        sliding_window=window,
    )  # fmt: skip
    assert torch.equal(both, torch.cat([out, expected]))


@pytest.mark.parametrize("sizes", [*SIZES, [6, 6, 6]], ids=str)
def test_rows_are_found_again(sizes):
    real = real_nodes(sizes, max(sizes))
    packing = pack(real)
    padded = torch.arange(real.numel()).view(real.shape) * 10
    rows = packed(padded, packing)
    assert len(rows) == sum(sizes)
    nodes = (torch.tensor(sizes) - 1)[:, None] * torch.tensor([0, 1])
    assert torch.equal(rows[rows_of(nodes, max(sizes), packing)], padded.gather(1, nodes))


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
