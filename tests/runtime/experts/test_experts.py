"""Mixtures of experts: routers, experts and shared experts in few launches, captured on every card."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

pytest.importorskip("triton")

from tests.runtime import fake_gpu as fakes
from tests.runtime.fake_gpu import HostWaitError, fake_gpu, why_not
from tests.runtime.gpu_world import CHAIN, IDS, SHAPE, new_model, placed_verifier
from tests.runtime.launch_counts import captured
from wingbeat.runtime.experts import blocks, forward, routers
from wingbeat.runtime.experts.blocks import FusedBlock
from wingbeat.runtime.experts.forward import EXPERTS_NAME, fuse_mixtures
from wingbeat.runtime.experts.routers import FusedRouter

FIELDS = SHAPE | IDS | {"tie_word_embeddings": False, "num_hidden_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OF_GLM = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 2}
OF_GROUPS = EXPERTS | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}
OF_DEEPSEEK = FIELDS | OF_GROUPS
OF_DEEPSEEK |= {"num_key_value_heads": SHAPE["num_attention_heads"], "kv_lora_rank": 32, "q_lora_rank": 32}
OF_DEEPSEEK |= {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}


def named(kind: str, **fields: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **FIELDS, **fields)


CONFIGS = {
    "qwen3-moe": lambda: Qwen3MoeConfig(**FIELDS, **EXPERTS),
    "normalised": lambda: Qwen3MoeConfig(**FIELDS, **EXPERTS, norm_topk_prob=True),
    "gpt-oss": lambda: GptOssConfig(**FIELDS, **LOCAL),
    "mixtral": lambda: MixtralConfig(**FIELDS, **LOCAL),
    "granitemoe": lambda: GraniteMoeConfig(**FIELDS, **LOCAL),
    "qwen2-moe": lambda: Qwen2MoeConfig(**FIELDS, **EXPERTS, shared_expert_intermediate_size=96),
    "qwen3-next": lambda: Qwen3NextConfig(
        **FIELDS, **EXPERTS, shared_expert_intermediate_size=32, layer_types=["full_attention"]
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **FIELDS, **OF_GLM, num_experts_per_tok=2, moe_intermediate_size=32, routed_scaling_factor=2.5
    ),
    "deepseek-v2": lambda: DeepseekV2Config(**OF_DEEPSEEK, topk_method="group_limited_greedy"),
    "deepseek-v3": lambda: DeepseekV3Config(**OF_DEEPSEEK),
    "dots1": lambda: named("dots1", **OF_GROUPS, n_shared_experts=1, layer_types=["full_attention"]),
    "ernie4-5-moe": lambda: named(
        "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0
    ),
    "hy-v3": lambda: named("hy_v3", **LOCAL, moe_intermediate_size=32, mlp_layer_types=["sparse"]),
    "hunyuan-v1-moe": lambda: named("hunyuan_v1_moe", **EXPERTS, moe_topk=2),
    "jamba": lambda: named("jamba", **EXPERTS, attn_layer_offset=0, attn_layer_period=1, expert_layer_offset=0),
    "minimax-m2": lambda: named("minimax_m2", **LOCAL),
    "olmoe": lambda: named("olmoe", **EXPERTS),
    "solar-open": lambda: named("solar_open", **OF_GROUPS),
}
WITH_SHARED = (
    *("qwen2-moe", "qwen3-next", "glm4-moe", "deepseek-v2", "deepseek-v3", "dots1", "ernie4-5-moe", "hunyuan-v1-moe"),
    *("solar-open", "hy-v3"),
)


def eager(kind: str) -> torch.nn.Module:
    """A model in float32 whose experts and routers are transformers' own, and whose biases are not zero."""
    model = new_model(CONFIGS[kind]()).eval().float()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name:
            tensor.data.normal_(0, 0.1)
    model.set_experts_implementation("eager")
    return model


def kinds_of(model: torch.nn.Module) -> dict[type, int]:
    """Number of swapped routers and blocks."""
    return {kind: sum(isinstance(one, kind) for one in model.modules()) for kind in (FusedRouter, FusedBlock)}


@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_rows_get_what_transformers_own_experts_give_them(kind):
    model, tokens = eager(kind), torch.arange(1, 40)[None]
    expected = model(input_ids=tokens, use_cache=False).logits
    fuse_mixtures(model)
    assert model.config._experts_implementation == EXPERTS_NAME
    assert kinds_of(model) == {FusedRouter: 1, FusedBlock: int(kind in WITH_SHARED)}
    found = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    one = model(input_ids=tokens[:, :1], use_cache=False).logits
    torch.testing.assert_close(one, expected[:, :1], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_router_that_chooses_by_another_rule_stays_as_it_is(monkeypatch):
    model = eager("mixtral")
    name = next(name for name in routers.ROUTERS if "Mixtral" in name)
    monkeypatch.setitem(routers.ROUTERS, name, routers.Known(sigmoid=True))
    fuse_mixtures(model)
    assert kinds_of(model)[FusedRouter] == 0
    assert model.config._experts_implementation == EXPERTS_NAME


@torch.inference_mode()
def test_experts_that_compute_other_numbers_stay_as_they_are(monkeypatch):
    model = eager("qwen2-moe")
    monkeypatch.setattr(forward, "sum_choices", lambda each, weights: each[: len(weights)])
    fuse_mixtures(model)
    assert model.config._experts_implementation == "eager"
    assert kinds_of(model)[FusedBlock] == 0


@torch.inference_mode()
def test_a_gate_of_another_form_is_computed_by_the_model(monkeypatch):
    model, tokens = eager("qwen3-moe"), torch.arange(1, 9)[None]
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = torch.nn.GELU()
    expected = model(input_ids=tokens, use_cache=False).logits
    fuse_mixtures(model)
    assert vars(experts)["_gate"] is None
    found = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", WITH_SHARED)
@torch.inference_mode()
def test_hooks_of_a_shared_expert_are_called(kind):
    """Adapters find linear layers by hooks, and ranks of a divided model add their sums in hooks."""
    model, tokens, calls = eager(kind), torch.arange(1, 9)[None], []
    fuse_mixtures(model)
    block = next(one for one in model.modules() if isinstance(one, FusedBlock))
    expected = model(input_ids=tokens, use_cache=False).logits
    blocks.shared_of(block).up_proj.register_forward_hook(lambda *_: calls.append(1))
    found = model(input_ids=tokens, use_cache=False).logits
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("card", [(8, 0), (8, 9), (12, 0), (9, 0)], ids=str)
def test_a_mixture_is_captured_on_every_card(monkeypatch, card):
    """With torch's product it is not, on those where that copies to the host."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    monkeypatch.setitem(fakes.CARD, "major", card[0])
    monkeypatch.setitem(fakes.CARD, "minor", card[1])
    with fake_gpu() as gpu:
        loaded = placed_verifier(CONFIGS["qwen3-moe"]())
        loaded.model.set_experts_implementation("grouped_mm")
        if card != (9, 0):
            with pytest.raises(HostWaitError, match="_grouped_mm copies the groups' ends"):
                captured(gpu, CHAIN, loaded)
        loaded.model.set_experts_implementation(EXPERTS_NAME)
        assert captured(gpu, CHAIN, loaded)
