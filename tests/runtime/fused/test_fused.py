"""Decoder layers are swapped for fused ones only where a trial gives the same numbers."""

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
)

from tests.optional import FEATURES, is_deleted
from tests.runtime.by_torch import by_torch
from tests.runtime.caching_allocator import CachingAllocator
from tests.runtime.hybrids import needs_states, random_hybrid
from tests.runtime.models import CONFIGS, SHAPE, noisy, of_type, random_model
from wingbeat.runtime.fused import layers
from wingbeat.runtime.fused.attention import FusedAttention
from wingbeat.runtime.fused.halves import Halves, HalvesLayer
from wingbeat.runtime.fused.layers import FusedLayer, FusedNorm, LayerOps, attention_of, fuse
from wingbeat.runtime.verifier.layers.same_code import known_as
from wingbeat.runtime.verifier.loading.loader import prepare_model

OPS = LayerOps()
FUSED = ("llama", "mistral", "qwen3")
LATENT = () if is_deleted(FEATURES["latent_attention"]) else ("deepseek_v3",)
SUM_FUSED = ("gemma2", "gemma3", "gpt_oss", "qwen3_moe", "mixtral", *LATENT)
ATTENTION_FUSED = ("gemma2", "gemma3", "gpt_oss", "qwen3_moe", "mixtral", *LATENT)


def prepared(monkeypatch, name: str, ops: LayerOps = OPS, **overrides):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": ops})
    return prepare_model(noisy(name, **overrides), name)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_known_layers_are_fused_and_pass_the_trial_against_transformers(monkeypatch, name):
    """`prepare_model` refuses a model whose logits are not those of transformers' own decoding."""
    loaded = prepared(monkeypatch, name)
    fused = [isinstance(layer, FusedLayer) for layer in loaded.decoder_layers]
    assert all(fused) if name in FUSED else not any(fused)
    halves = [isinstance(layer.self_attn, FusedAttention) for layer in loaded.decoder_layers]
    assert all(halves) if name in ATTENTION_FUSED else not any(halves)
    sums = [isinstance(layer, HalvesLayer) for layer in loaded.decoder_layers]
    assert all(sums) if name in SUM_FUSED else not any(sums)


def test_layers_that_add_in_another_way_are_not_fused(monkeypatch):
    """Gemma's layers have a norm between attention and the sum."""
    kind = layers.name_of(type(noisy("gemma3").model.layers[0]))
    norms = ("input_layernorm", "pre_feedforward_layernorm")
    monkeypatch.setattr(layers, "KNOWN_HALVES", {kind: Halves(norms, ("self_attn",), ("mlp",))})
    loaded = prepared(monkeypatch, "gemma3")
    assert not any(isinstance(layer, HalvesLayer) for layer in loaded.decoder_layers)


@pytest.mark.parametrize("name", ATTENTION_FUSED)
def test_attention_of_other_layers_is_fused_in_half_precision(monkeypatch, name):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    loaded = prepare_model(noisy(name).bfloat16(), name)
    assert all(isinstance(layer.self_attn, FusedAttention) for layer in loaded.decoder_layers)


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SHAPE, attention_multiplier=0.3, residual_multiplier=0.5),
        GraniteMoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.3),
        Qwen2MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        GlmConfig(**SHAPE),
        Glm4Config(**SHAPE),
        PhiConfig(**SHAPE),
        Phi3Config(**SHAPE),
        Cohere2Config(**SHAPE, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=6),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_of_families_that_no_other_test_has_is_fused(monkeypatch, config):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    torch.manual_seed(0)
    loaded = prepare_model(AutoModelForCausalLM.from_config(config), config.model_type)
    assert all(isinstance(layer.self_attn, FusedAttention) for layer in loaded.decoder_layers)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["seed_oss", "smollm3", "ministral", "ernie4_5", "helium", "hunyuan_v1_dense"])
def test_layers_with_a_known_layers_code_are_fused_whole(monkeypatch, name):
    """Every fourth layer of SmolLM3 rotates nothing."""
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    loaded = prepare_model(of_type(name), name)
    assert all(isinstance(layer, FusedLayer) for layer in loaded.decoder_layers)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["gemma", "arcee", "olmo2", "olmo3", "exaone4", "olmoe", "minimax_m2", "granitemoeshared"]
)
def test_other_layers_have_fused_sums(monkeypatch, name):
    """Layers with another MLP, with norms behind attention and MLP, or with one norm over all heads."""
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    loaded = prepare_model(of_type(name), name)
    assert all(isinstance(layer, HalvesLayer) for layer in loaded.decoder_layers)
    assert all(isinstance(attention_of(layer), FusedAttention) for layer in loaded.decoder_layers)


def test_classes_that_differ_in_a_function_that_they_call_are_not_the_same():
    """Ernie's attention has the code of Llama's, but calls another rotation."""
    ernie, arcee = (type(attention_of(of_type(name).model.layers[0])) for name in ("ernie4_5", "arcee"))
    llama = frozenset({layers.name_of(type(attention_of(noisy("llama").model.layers[0])))})
    assert known_as(ernie, llama) is None
    assert known_as(arcee, llama) == next(iter(llama))


@needs_states
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["lfm2", "qwen3_5", "qwen3_next", "falcon_h1", "bamba", "granite", "jamba", "nemotron_h"]
)
def test_attention_beside_mixers_is_fused(monkeypatch, name):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    loaded = prepare_model(random_hybrid(name), name)
    halves = [
        attention_of(layer) for layer, kind in zip(loaded.decoder_layers, loaded.layers, strict=True) if kind.num_heads
    ]
    assert halves
    assert all(isinstance(half, FusedAttention) for half in halves)
    summed = [isinstance(layer, HalvesLayer) for layer in loaded.decoder_layers]
    assert not any(summed) if name == "nemotron_h" else all(summed)


def test_layers_with_biases_are_fused(monkeypatch):
    loaded = prepared(monkeypatch, "llama", attention_bias=True, mlp_bias=True)
    assert all(isinstance(layer, FusedLayer) for layer in loaded.decoder_layers)


def test_weights_keep_names_and_values_and_lie_in_the_joined_ones(monkeypatch):
    before = {name: weight.clone() for name, weight in noisy("llama").state_dict().items()}
    loaded = prepared(monkeypatch, "llama")
    after = loaded.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    layer = loaded.decoder_layers[0]
    with torch.no_grad():
        layer.self_attn.k_proj.weight.fill_(7)
    num_queries = len(layer.self_attn.q_proj.weight)
    assert bool((layer._half.qkv.weight[num_queries : num_queries + 4] == 7).all())


def test_a_copy_has_its_own_weights(monkeypatch):
    layer = prepared(monkeypatch, "llama").decoder_layers[0]
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.mlp.up_proj.weight.zero_()
    assert bool(layer._gate_up.weight.any(1).all())
    assert not bool(twin._gate_up.weight[-1].any())


def test_a_model_that_moves_takes_its_joined_weights_along(monkeypatch):
    layer = prepared(monkeypatch, "llama").decoder_layers[0].to(torch.bfloat16)
    qkv, gate_up = (joined.weight for joined in (layer._half.qkv, layer._gate_up))
    assert qkv.dtype == gate_up.dtype == torch.bfloat16
    assert layer.self_attn.q_proj.weight.data_ptr() == qkv.data_ptr()


@pytest.mark.parametrize("broken", ["add_rms_norm", "rotate_and_store", "silu_mul"])
def test_a_layer_that_a_step_would_change_is_left_and_said(monkeypatch, caplog, broken):
    def wrong(*args):
        out = getattr(OPS, broken)(*args)
        return (out[0] * 1.01, out[1]) if isinstance(out, tuple) else out * 1.01

    with caplog.at_level(logging.INFO):
        loaded = prepared(monkeypatch, "llama", OPS._replace(**{broken: wrong}))
    assert not any(isinstance(layer, FusedLayer) for layer in loaded.decoder_layers)
    [line] = [record.getMessage() for record in caplog.records if "decoder layers are fused" in record.getMessage()]
    only = "only attention is fused, because " if broken in ("add_rms_norm", "silu_mul") else ""
    assert line == f"0 of 4 decoder layers are fused; 4 are not: {only}a trial gives other numbers"


def test_angles_that_a_step_would_change_are_left(monkeypatch):
    def angles(wrong: float) -> tuple[str, torch.Tensor]:
        step = OPS._replace(rotations=lambda *args: tuple(wrong * wave for wave in OPS.rotations(*args)))
        module = prepared(monkeypatch, "llama", step).model.model.rotary_emb
        return type(module).__mro__[1].__name__, module(torch.zeros(1), torch.tensor([[7]]))[0]

    (fused, theirs), (left, own) = angles(1.0), angles(1.01)
    assert (fused, left) == ("FusedRotary", "Module")
    assert torch.allclose(theirs, own)


def test_another_activation_is_left(monkeypatch):
    loaded = prepared(monkeypatch, "llama", hidden_act="gelu")
    assert not any(isinstance(layer, FusedLayer) for layer in loaded.decoder_layers)


def test_the_norm_behind_the_layers_is_fused_too(monkeypatch):
    assert isinstance(prepared(monkeypatch, "llama").model.model.norm, FusedNorm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_multiply_by_one_more_than_their_weight_are_fused(monkeypatch, dtype):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    model = prepare_model(noisy("gemma2").to(dtype), "gemma2").model
    norm, rows = model.model.norm, torch.randn(3, model.config.hidden_size).to(dtype)
    assert isinstance(norm, FusedNorm)
    with torch.no_grad():
        norm.weight.fill_(1.0)
        expected = 2 * rows.float() * rows.float().square().mean(-1, keepdim=True).rsqrt()
        torch.testing.assert_close(norm.to(torch.float32)(rows.float()), expected, rtol=1e-5, atol=1e-5)


def test_norms_of_another_formula_are_left(monkeypatch):
    model = noisy("llama")
    kind = type(model.model.norm)
    doubled = type("DoubledRMSNorm", (kind,), {"forward": lambda self, rows: 2 * kind.forward(self, rows)})
    model.model.norm.__class__ = doubled
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": OPS})
    assert type(prepare_model(model, "llama").model.model.norm) is doubled


def test_devices_without_such_steps_are_left_alone():
    model = noisy("llama")
    assert by_torch(lambda: fuse(model, nn.ModuleList(), [])) == 0
    assert not any(isinstance(part, FusedLayer | FusedNorm) for part in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("gives_back", [True, False])
def test_joining_leaves_less_than_a_layers_weights_unused_in_the_allocator(monkeypatch, gives_back: bool):
    """Else the last layer would leave as much as all of them hold, which nobody has while the drafter loads."""
    model = random_model("llama", hidden_size=1024, intermediate_size=6144, num_hidden_layers=3)
    loaded, allocator = by_torch(lambda: prepare_model(model, "llama")), CachingAllocator()
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.empty_cache if gives_back else lambda: None)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        allocator.allocate(parameter)
    layer_bytes = sum(parameter.nbytes for parameter in loaded.decoder_layers[0].parameters())
    with allocator:
        assert fuse(model, loaded.decoder_layers, loaded.layers, OPS) == 3
        assert allocator.unused < layer_bytes or not gives_back
    assert (allocator.most_unused < layer_bytes) == gives_back
