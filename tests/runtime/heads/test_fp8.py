"""EAGLE heads with weights of eight bits: other drafts perhaps, the same text."""

from types import SimpleNamespace

import pytest
import torch

from tests.runtime.models import DEMO_PAIR, TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.fp8 import Fp8Linear, use_fp8
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine

COUNT = 24


@torch.inference_mode()
def test_the_heads_logits_are_close_to_those_of_its_own_weights():
    head = eagle_drafter(reference("llama").loaded, TREE).head
    hidden = torch.randn(5, head.hidden_size, generator=torch.Generator().manual_seed(0))
    before = head.logits(hidden)
    use_fp8(head)
    assert not any(isinstance(part, torch.nn.Linear) for part in head.modules())
    near = torch.nn.functional.cosine_similarity(head.logits(hidden), before, dim=-1)
    assert bool((near > 0.99).all())
    assert not torch.equal(head.logits(hidden), before)


def test_a_gpu_without_float8_is_refused_by_the_settings_name(monkeypatch):
    head = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"drafter_weights is fp8: the GPU's compute capability is 8\.6, 8\.9 is"):
        use_fp8(head)


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
    assert isinstance(drafter.head.lm_head, Fp8Linear)
    with pytest.raises(ValueError, match="drafter_weights is fp8 and drafter is 'none': only EAGLE heads"):
        load_drafter("none", target, TREE, options)
