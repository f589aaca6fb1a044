"""Experts of mixtures where torch's product of groups would wait for the host."""

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

pytest.importorskip("triton")

from tests.runtime import fake_gpu as fakes
from tests.runtime.fake_gpu import HostWaitError, fake_gpu, why_not
from tests.runtime.gpu_world import CHAIN, IDS, SHAPE, new_model, placed_verifier
from tests.runtime.launch_counts import captured
from wingbeat.runtime.experts.forward import EXPERTS_NAME, choose_experts

FIELDS = SHAPE | IDS | {"tie_word_embeddings": False, "num_hidden_layers": 1}
CONFIGS = {
    "qwen3-moe": lambda: Qwen3MoeConfig(**FIELDS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt-oss": lambda: GptOssConfig(**FIELDS, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_rows_get_what_transformers_own_experts_give_them(kind):
    model = new_model(CONFIGS[kind]()).eval().float()
    tokens = torch.arange(1, 40)[None]
    model.set_experts_implementation("eager")
    expected = model(input_ids=tokens, use_cache=False).logits
    model.set_experts_implementation(EXPERTS_NAME)
    found = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    one = model(input_ids=tokens[:, :1], use_cache=False).logits
    torch.testing.assert_close(one, expected[:, :1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("card", "own"), [((8, 0), True), ((8, 9), True), ((12, 0), True), ((9, 0), False)], ids=str)
def test_a_mixture_iscaptured_on_every_card(monkeypatch, card, own):
    """With torch's product it is not, on those where that copies to the host."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    monkeypatch.setitem(fakes.CARD, "major", card[0])
    monkeypatch.setitem(fakes.CARD, "minor", card[1])
    with fake_gpu() as gpu:
        loaded = placed_verifier(CONFIGS["qwen3-moe"]())
        loaded.model.set_experts_implementation("grouped_mm")
        if own:
            with pytest.raises(HostWaitError, match="_grouped_mm copies the groups' ends"):
                captured(gpu, CHAIN, loaded)
        choose_experts(loaded.model)
        assert (loaded.model.config._experts_implementation == EXPERTS_NAME) == own
        assert captured(gpu, CHAIN, loaded)
