"""Attention over packed trees gives the results of attention over padded ones."""

import pytest
import torch

from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.tree.reference import ancestor_mask, ancestor_words
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_in_blocks, attend_segments

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
BLOCK_SIZE, DIM = 4, 8
SIZES = [[6, 1, 2], [1, 7, *[1] * 8, 7], [1, 7, *[2, 1] * 5, 6]]


def real_nodes(sizes):
    return torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]


def world(sizes):
    """Queries of padded trees, caches with a context for each, block tables, contexts' lengths, and parents."""
    generator = torch.Generator().manual_seed(2)
    num_reqs, num_nodes = len(sizes), max(sizes)
    context = torch.randint(0, 7, (num_reqs,), generator=generator)
    width = -(-(6 + num_nodes) // BLOCK_SIZE)
    tables = torch.randperm(num_reqs * width, generator=generator).view(num_reqs, width) + 1
    caches = [torch.randn(num_reqs * width + 1, BLOCK_SIZE, 2, DIM, generator=generator) for _ in range(2)]
    query = torch.randn(num_reqs, num_nodes, 6, DIM, generator=generator)
    parents = torch.tensor([-1, 0, 0, 1, 2, 2, 4])[:num_nodes].expand(num_reqs, -1).contiguous()
    return query, caches, tables, context, parents


@pytest.mark.parametrize("kernels", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("window", [0, 3])
def test_attention_of_packed_rows_is_that_of_padded_ones(sizes, window, kernels):
    query, caches, tables, context, parents = world(sizes)
    positions = context[:, None] + ancestor_mask(parents).sum(-1) - 1
    padded = Segment(0, *positions.shape, tables, context, positions, ancestor_words(parents))
    expected = attend_in_blocks(query.flatten(0, 1), *caches, [padded], 0.3, sliding_window=window)
    real = real_nodes(sizes)
    segment = padded._replace(row_starts=torch.tensor([0, *sizes]).cumsum(0))
    beside = padded._replace(start=sum(sizes))
    rows = torch.cat([query[real], query.flatten(0, 1)])
    attend = attend_segments if kernels else attend_in_blocks
    out = attend(rows, *caches, [segment, beside], 0.3, sliding_window=window)
    torch.testing.assert_close(out[: sum(sizes)], expected.view(query.shape)[real])
    torch.testing.assert_close(out[sum(sizes) :], expected)
