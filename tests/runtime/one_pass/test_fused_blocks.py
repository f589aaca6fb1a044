"""Layers of one-pass heads in the fused steps of a GPU compute what they compute step by step."""

import pytest
import torch

from tests.runtime.heads.test_fused_layer import NUM_ROWS, SHAPE, Attended
from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.one_pass.config import LatticeConfig, LayerMask, OnePassConfig, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("family", [OnePassFamily.DFLASH, OnePassFamily.DFLASH2])
@torch.inference_mode()
def test_fused_steps_are_the_layers_of_a_block(family, normed):
    torch.manual_seed(3)
    config = OnePassConfig(
        **SHAPE,
        family=family,
        slots=Slots.FILL_IN,
        block_size=3,
        masks=(LayerMask(),) * 2,
        tap_layers=(0,),
        mask_token_id=39,
        attention_bias=not normed,
        qk_norm=normed,
        lattice=LatticeConfig(2, 6, 4, 5) if family is OnePassFamily.DFLASH2 else None,
    )
    head = OnePassHead(config).eval()
    for weight in head.parameters():
        weight.data.uniform_(-0.5, 1.0)
    rotary = head.rotary(5 + torch.arange(NUM_ROWS).view(2, 3))
    ways = [[Attended(in_fused_steps=fused) for _ in range(2)] for fused in (False, True)]
    apart, fused = (head.run_block(torch.tensor([4, 7]), rotary, way) for way in ways)
    assert [attended.num_calls for way in ways for attended in way] == [1, 1, 0, 0]
    torch.testing.assert_close(fused, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [None, torch.tensor([5, 2])], ids=["all rows", "two rows"])
@pytest.mark.parametrize("normed", [False, True])
@torch.inference_mode()
def test_fused_steps_are_the_layers_of_a_head(normed, rows):
    torch.manual_seed(3)
    config = EagleHeadConfig(**SHAPE, tap_layers=(0, 1), qk_norm=normed, num_layers=3)
    head = ParallelEagleHead(config, mask_token_id=2).eval()
    token_ids, positions = torch.arange(NUM_ROWS), 5 + torch.arange(NUM_ROWS)
    features = torch.randn(NUM_ROWS, 24, generator=torch.Generator().manual_seed(1))
    ways = [[Attended(in_fused_steps=fused) for _ in range(3)] for fused in (False, True)]
    apart, fused = (head.run_layers(token_ids, features, head.rotary(positions), way, rows) for way in ways)
    assert [attended.num_calls for way in ways for attended in way] == [1, 1, 1, 0, 0, 0]
    torch.testing.assert_close(fused, apart, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(ways[1], ways[0], strict=True):
        torch.testing.assert_close(ours.cache, theirs.cache, rtol=1e-5, atol=1e-5)
