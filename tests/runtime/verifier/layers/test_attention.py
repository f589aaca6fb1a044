"""Segments of a flattened batch: every way of attending to them gives what dense masks give."""

import pytest
import torch

from wingbeat.kernels.attention.reference import context_mask, paged_attention
from wingbeat.kernels.tree.reference import ancestor_mask
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.attention import attend_in_blocks, attend_segments

BLOCK_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


def mixed_batch(generator: torch.Generator):
    """Rows of a round, as (start, positions, num_context, visible, block_tables): two trees, then two prompt chunks."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 0, 4]])
    trees = ancestor_mask(parents)
    tables = (torch.randperm(40, generator=generator) + 1).view(4, 10)
    roots = torch.tensor([17, 5])
    segments = [(0, roots[:, None] + trees.sum(-1) - 1, roots, trees, tables[:2])]
    for start, row, begin, length in ((12, 2, 9, 11), (23, 3, 0, 1)):
        positions = torch.arange(begin, begin + length)[None]
        segments.append((start, positions, torch.tensor([begin]), None, tables[row : row + 1]))
    return segments, 24


def by_masks(query, caches, batch, window, **options):
    """By the formula, segment after segment."""
    outs = []
    for start, positions, num_context, visible, tables in batch:
        num_reqs, num_query = positions.shape
        shown = torch.ones(num_query, num_query, dtype=torch.bool).tril() if visible is None else visible
        num_keys = tables.shape[1] * BLOCK_SIZE
        shown = shown.expand(num_reqs, -1, -1)
        mask = context_mask(positions, num_context, shown, num_keys, window or None, torch.float32)
        rows = query[start : start + num_reqs * num_query].unflatten(0, (num_reqs, num_query))
        outs.append(paged_attention(rows, *caches, tables, mask, 0.3, **options).flatten(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 1, NUM_HEADS)}], ids=list)
@pytest.mark.parametrize("window", [0, 6])
def test_segments_attend_as_masks_say(window, options):
    generator = torch.Generator().manual_seed(0)
    batch, num_tokens = mixed_batch(generator)
    caches = torch.randn(2, 41, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    segments = [Segment.of(*segment) for segment in batch]
    expected = by_masks(query, caches, batch, window, **options)
    for attend in (attend_segments, attend_in_blocks):
        out = attend(query, *caches, segments, 0.3, sliding_window=window, **options)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_a_single_row_needs_no_words():
    one = Segment.of(0, *(torch.tensor([[7]]), torch.tensor([7])), torch.ones(1, 1, 1) > 0, torch.ones(1, 3))
    assert one.mask_words is None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 6])
def test_a_batch_on_the_gpu_is_the_batch_on_the_cpu(window):
    generator = torch.Generator().manual_seed(0)
    batch, num_tokens = mixed_batch(generator)
    caches = torch.randn(2, 41, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    outs = []
    for device in ("cpu", "cuda"):
        moved = [[part.to(device) if isinstance(part, torch.Tensor) else part for part in segment] for segment in batch]
        segments = [Segment.of(*segment) for segment in moved]
        out = attend_segments(query.to(device), *caches.to(device), segments, 0.3, sliding_window=window)
        outs.append(out.cpu())
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", [attend_segments, attend_in_blocks], ids=["native", "torch"])
def test_rows_that_see_no_key_are_finite(attend):
    """Padding of a piece: its keys lie past a table that ends with the prompt, and the prompt before its window."""
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, 3, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    query = torch.randn(16, NUM_HEADS, HEAD_DIM, generator=generator)
    segment = Segment.of(0, torch.arange(16)[None], torch.tensor([0]), None, torch.tensor([[1]]))
    assert attend(query, *caches, [segment], 0.3, sliding_window=6).isfinite().all()
