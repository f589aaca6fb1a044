"""EAGLE heads with 8-bit weights write the same text, though their drafts may differ."""

import pytest
import torch

from tests.runtime.models import DEMO_PAIR, TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.fp8_heads.fp8_weights import to_fp8, use_fp8
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.layers.linears import dense_weight

COUNT = 24


@torch.inference_mode()
def test_the_heads_logits_are_close_to_those_of_its_own_weights():
    head = eagle_drafter(reference("llama").loaded, TREE).head
    hidden = torch.randn(5, head.hidden_size, generator=torch.Generator().manual_seed(0))
    before = head.logits(hidden)
    use_fp8(head)
    near = torch.nn.functional.cosine_similarity(head.logits(hidden), before, dim=-1)
    assert bool((near > 0.99).all())
    assert not torch.equal(head.logits(hidden), before)


def test_each_channel_is_rounded_by_its_own_scale():
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(9)) * torch.logspace(-1, 1, 9)[:, None]
    weight[4] = 0.0
    rounded = to_fp8(weight)
    largest = rounded.values.view(torch.float8_e4m3fn).float().abs().amax(dim=1)
    assert torch.equal(largest, torch.tensor([448.0] * 4 + [0.0] + [448.0] * 4))
    # Rounding errors: half a unit of three mantissa bits, and a subnormal step of 2^-9 for the smallest values.
    off = (rounded.dense() - weight).abs()
    assert bool((off <= weight.abs() / 16 + rounded.scales.numbers / 512).all())


def test_text_drafted_by_fp8_weights_is_the_verifiers():
    ref = reference("llama")
    drafter = eagle_drafter(ref.loaded, TREE)
    use_fp8(drafter.head)
    engine = build_engine(ref.loaded, engine_config(), drafter, InProcessChannel)
    try:
        texts = Run(engine, ref.prompts[:3], greedy_params(COUNT)).finish()
    finally:
        engine.model.remove_taps()
    assert texts == [tokens[:COUNT] for tokens in ref.continuations[:3]]
    assert engine.stats().speculation.num_drafts


def test_the_option_is_for_heads_alone():
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    options = DrafterOptions(fp8_weights=True)
    drafter = load_drafter(DEMO_PAIR / "drafter", target, TREE, options)
    plain = load_drafter(DEMO_PAIR / "drafter", target, TREE, DrafterOptions())
    rounded = to_fp8(plain.head.lm_head.weight).dense()
    assert torch.equal(dense_weight(drafter.head.lm_head), rounded)
    with pytest.raises(ValueError, match="drafter_weights is fp8 and drafter is 'none': only EAGLE heads"):
        load_drafter("none", target, TREE, options)
