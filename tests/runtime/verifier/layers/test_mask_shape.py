"""Tokens hidden by transformers' masks are read from the mask functions, at lengths that no test could run."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from wingbeat.runtime.verifier.layers.mask_shape import MaskShape, for_text, mask_shape


@pytest.mark.parametrize("window", [1, 2, 16, 4096, 99_999])
def test_a_window_of_any_width_is_found(window):
    assert mask_shape(sliding_window_causal_mask_function(window), 100_000) == MaskShape(window=window)


@pytest.mark.parametrize("window", [512, 4096])
def test_a_window_that_no_sequence_fills_hides_nothing(window):
    assert mask_shape(sliding_window_causal_mask_function(window), 512) == MaskShape()


def test_a_causal_mask_hides_nothing():
    assert mask_shape(causal_mask_function, 131_072) == MaskShape()


def test_chunks_are_causal_up_to_the_first_ones_end():
    chunked = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64))
    assert mask_shape(chunked, 100_000) == MaskShape(causal_until=8192)


def test_what_no_window_describes_is_causal_up_to_where_it_begins():
    """Keys of the first position hidden from 50 on, and nothing else."""
    forgetful = and_masks(causal_mask_function, lambda batch, head, query, key: (key > 0) | (query < 50))
    assert mask_shape(forgetful, 1000) == MaskShape(causal_until=50)


def test_a_mask_that_shows_later_keys_has_no_shape():
    assert mask_shape(bidirectional_mask_function, 100) is None


def test_what_lets_images_see_themselves_says_nothing_of_text():
    """An overlay knows the tokens of its pass only, all of them text here."""
    overlay = blockwise_overlay(torch.full((1, 9), -1))
    both = or_masks(or_masks(sliding_window_causal_mask_function(64), overlay), overlay)
    with pytest.raises(IndexError):
        mask_shape(both, 1000)
    assert mask_shape(for_text(both, 9), 1000) == MaskShape(window=64)
