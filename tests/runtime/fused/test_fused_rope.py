"""Rotations are fused only where every bit stays the same."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.runtime.models import CONFIGS
from wingbeat.runtime.fused.speed_up import FUNCTION_NAME, Rope, fuse_rope

pytestmark = pytest.mark.few(3)


def random_model(config, dtype=torch.float32):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def num_attentions(model):
    return sum(hasattr(module, "layer_idx") and hasattr(module, "q_proj") for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_keep_every_bit(name, dtype):
    model = random_model(CONFIGS[name], dtype)
    token_ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(token_ids).logits
        num_fused = fuse_rope(model)
        assert torch.equal(model(token_ids).logits, before)
        later = model(token_ids, position_ids=torch.arange(9)[None] + 40).logits
    assert num_fused == (0 if name == "gpt_oss" else num_attentions(model)), "gpt-oss has an angle for each half"
    assert not torch.equal(later, before), "the angles of one pass must not be those of the next"


def test_models_do_not_share_angles():
    one, other = random_model(CONFIGS["llama"]), random_model(CONFIGS["llama"])
    plain = copy.deepcopy(one)
    fuse_rope(one), fuse_rope(other)
    token_ids = torch.arange(9)[None]
    with torch.no_grad():
        other(token_ids, position_ids=torch.arange(9)[None] + 3)
        assert torch.equal(one(token_ids).logits, plain(token_ids).logits)


def test_fusing_twice_changes_nothing():
    model = random_model(CONFIGS["llama"])
    fuse_rope(model)
    kinds = [type(module) for module in model.modules()]
    fuse_rope(model)
    assert kinds == [type(module) for module in model.modules()]


@pytest.mark.parametrize("name", ["cohere", "glm"])
def test_other_rotations_are_left_right(name):
    """Interleaved and partial ones: fused or not, the logits stay."""
    config = AutoConfig.for_model(
        name, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    model = random_model(config)
    token_ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(token_ids).logits
        fuse_rope(model)
        assert torch.equal(model(token_ids).logits, before)


def test_a_function_that_only_looks_alike_is_left_alone(monkeypatch):
    def apply_rotary_pos_emb(q, k, cos, sin):
        return q * cos[:, None], k * cos[:, None]

    monkeypatch.setitem(globals(), FUNCTION_NAME, apply_rotary_pos_emb)
    assert fuse_rope(nn.Sequential(LooksAlike())) == 0


def test_a_function_of_higher_precision_is_left_alone_where_that_shows(monkeypatch):
    def apply_rotary_pos_emb(q, k, cos, sin):
        rotated = modeling_llama.apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
        return rotated[0].to(q.dtype), rotated[1].to(k.dtype)

    monkeypatch.setitem(globals(), FUNCTION_NAME, apply_rotary_pos_emb)
    for dtype, num_fused in ((torch.float64, 1), (torch.bfloat16, 0)):
        module = LooksAlike()
        module.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        assert fuse_rope(nn.Sequential(module)) == num_fused


class LooksAlike(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)  # noqa: F821


def test_what_is_not_covered_goes_to_the_original():
    calls = []
    rope = Rope(lambda *args, **kwargs: calls.append((args, kwargs)) or ("q", "k"))
    q, angles = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 4)
    assert rope(q, q, angles, angles) == ("q", "k"), "part of each head"
    assert rope(q, q, q, q, unsqueeze_dim=2) == ("q", "k")
    whole = torch.zeros(1, 3, 8, dtype=torch.float64)
    assert rope(q, q, whole, whole) == ("q", "k"), "angles of another precision"
    assert len(calls) == 3


@pytest.mark.slow
def test_a_fused_model_can_be_compiled():
    """torch.compile looks names up by a function's module, where the model's own function still is."""
    torch._dynamo.reset()
    model = random_model(CONFIGS["llama"])
    fuse_rope(model)
    token_ids = torch.arange(9)[None]
    with torch.inference_mode():
        expected = model(token_ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(token_ids, use_cache=False).logits, expected)
