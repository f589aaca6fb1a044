"""Segments of a flattened batch: what the CPU reads from dense masks equals what the kernel reads from mask words."""

import pytest
import torch

from wingbeat.kernels.tree.reference import ancestor_mask, pack_mask
from wingbeat.runtime.verifier.layers.attention import (
    AttentionSegment,
    attend_in_blocks,
    attend_segments,
    build_segment,
)

BLOCK_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def of_words(start, positions, num_context, visible, block_tables) -> AttentionSegment:
    """A segment as `build_segment` makes it on CUDA."""
    words = None if visible is None else pack_mask(visible)
    return AttentionSegment(
        start, *positions.shape, block_tables, {}, num_context=num_context, positions=positions, mask_words=words
    )


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 1, NUM_HEADS)}], ids=list)
@pytest.mark.parametrize("window", [0, 6])
def test_masks_and_words_say_the_same(window, options):
    generator = torch.Generator().manual_seed(0)
    batch, num_tokens = mixed_batch(generator)
    caches = torch.randn(2, 41, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    dense = [build_segment(*segment, BLOCK_SIZE, (0, 6), torch.float32) for segment in batch]
    by_masks = attend_segments(query, *caches, dense, 0.3, sliding_window=window, **options)
    by_words = attend_in_blocks(query, *caches, [of_words(*s) for s in batch], 0.3, sliding_window=window, **options)
    torch.testing.assert_close(by_words, by_masks, atol=1e-6, rtol=1e-5)


def test_no_visibility_is_causal():
    positions, context = torch.arange(7, 12)[None], torch.tensor([7])
    tables = torch.tensor([[1, 2, 3]])
    tril = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    causal = build_segment(0, positions, context, None, tables, BLOCK_SIZE, (0, 3), torch.float32)
    given = build_segment(0, positions, context, tril, tables, BLOCK_SIZE, (0, 3), torch.float32)
    assert all(torch.equal(causal.masks[window], given.masks[window]) for window in (0, 3))


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
        segments = [build_segment(*segment, BLOCK_SIZE, (0, 6), torch.float32) for segment in moved]
        assert all(bool(segment.masks) == (device == "cpu") for segment in segments)
        out = attend_segments(query.to(device), *caches.to(device), segments, 0.3, sliding_window=window)
        outs.append(out.cpu())
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
