"""A P-EAGLE head reads what a model embeds for images and audio."""

from functools import partial

import pytest
import torch

from tests.runtime.media.test_drafter_sees import ALL, NUM_TOKENS, check_same_drafts, drafts_of, head_for, tokens_of
from wingbeat.runtime.one_pass.one_pass_drafter import ParallelEagleDrafter
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_a_parallel_head_sees_the_same_by_kernels_and_in_fixed_shapes(name):
    fields = {"kind": partial(ParallelEagleHead, mask_token_id=3), "num_layers": 2}
    head, blind = head_for(name, **fields), head_for(name, **fields, embeds_media=False)
    torch.nn.init.normal_(head.mask_hidden)
    blind.load_state_dict(head.state_dict())
    by_kernels, fixed, other = (
        drafts_of(name, one, way, ParallelEagleDrafter)
        for one, way in ((head, "kernels"), (head, "fixed shapes"), (blind, "kernels"))
    )
    check_same_drafts(by_kernels, fixed, NUM_TOKENS)
    assert tokens_of(by_kernels) != tokens_of(other)
