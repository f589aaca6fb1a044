"""Attention over latents is fused where a trial gives the same numbers, and writes what transformers writes."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.runtime.hybrids import needs_states
from tests.runtime.models import SHAPE, Run, add_noise, engine_config, greedy, greedy_params, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.fused.attention import FusedAttention
from wingbeat.runtime.fused.halves import HalvesLayer
from wingbeat.runtime.fused.layers import LayerOps
from wingbeat.runtime.latent_attention.half import LatentHalf
from wingbeat.runtime.latent_attention.kept import keep_latents
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

LATENT = {"kv_lora_rank": 24, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
DENSE = {"num_key_value_heads": SHAPE["num_attention_heads"], "first_k_dense_replace": 9}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent queries": ("deepseek_v3", {"q_lora_rank": 20}),
    "plain queries": ("deepseek_v3", {"q_lora_rank": None}),
    "halves": ("deepseek_v3", {"q_lora_rank": 20, "rope_interleave": False}),
    "biases": ("deepseek_v3", {"q_lora_rank": 20, "attention_bias": True}),
    "mixtures": (
        "deepseek_v3",
        {"q_lora_rank": 20, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {"q_lora_rank": 20, "mlp_layer_types": ["dense"] * SHAPE["num_hidden_layers"]}),
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 9}),
    "complex with latent queries": ("deepseek_v2", {"q_lora_rank": 20}),
    "axk1": ("axk1", {"q_lora_rank": 20, "mlp_layer_types": ["dense"] * SHAPE["num_hidden_layers"]}),
    "minicpm3": ("minicpm3", {"q_lora_rank": 20}),
    "youtu": ("youtu", {"q_lora_rank": 20}),
}


def config_of(name: str, **fields: Any) -> PreTrainedConfig:
    """A small config; the test is skipped if transformers is too old for the family."""
    try:
        return AutoConfig.for_model(name, **SHAPE | fields)
    except ValueError as error:
        pytest.skip(str(error))


def model_of(kind: str) -> torch.nn.Module:
    name, fields = KINDS[kind]
    torch.manual_seed(0)
    config = config_of(name, **LATENT | DENSE | fields)
    return add_noise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize("stored", ["heads", "latents"])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_write_what_generate_writes(monkeypatch, kind, stored):
    """Prompts in chunks, trees, and plain rounds."""
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    prompts = random_prompts((11, 3))
    expected, _ = greedy(model_of(kind), prompts, 8)
    loaded = prepare_model(model_of(kind), kind)
    for layer in loaded.decoder_layers:
        assert isinstance(layer, HalvesLayer) == (kind != "axk1")  # which has a norm more
        assert isinstance(layer.self_attn, FusedAttention)
        assert isinstance(layer.self_attn._half, LatentHalf)
    if stored == "latents":
        keep_latents(loaded)
        assert {layer.kv_size for layer in loaded.layers} == {LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]}
    check_texts(loaded, prompts, expected)


def check_texts(loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Check the texts of an engine that verifies trees, and of one that decodes."""
    sequences = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    shape = SpeculationConfig(draft_steps=2, draft_top_k=3, verify_tree_size=6)
    engine = build_engine(loaded, engine_config(shape, max_num_batched_tokens=8), drafter, InProcessChannel)
    for speculation in (True, False):
        assert Run(engine, prompts, greedy_params(8, speculation=speculation)).finish() == expected


@needs_states
@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid"])
def test_hybrids_store_latents_beside_their_states(monkeypatch, name):
    """Kimi Linear's attention rotates nothing; Ling 3's has a gate per head."""
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    layers = SHAPE["num_hidden_layers"]
    kinds = {
        "layer_types": ["linear_attention", "full_attention"] * (layers // 2),
        "mlp_layer_types": ["dense"] * layers,
    }
    fields = LATENT | DENSE | kinds | {"linear_head_dim": 16, "linear_num_heads": 4}
    config = config_of(name, **fields)

    def new_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return add_noise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())

    prompts = random_prompts((11, 3))
    expected, _ = greedy(new_model(), prompts, 8)
    loaded = prepare_model(new_model(), name)
    keep_latents(loaded)
    size = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert [layer.kv_size for layer in loaded.layers] == [0, size] * (layers // 2)
    check_texts(loaded, prompts, expected)


def test_queries_are_scaled_by_position(monkeypatch):
    """Mistral 4: the second scale begins behind the sequences of the trial at load."""
    new = getattr(transformers, "Mistral4ForCausalLM", None)
    if new is None:
        pytest.skip("transformers has no Mistral 4")
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    config = AutoConfig.for_model("mistral4", **SHAPE | LATENT | DENSE | {"q_lora_rank": 20})
    scales = {"llama_4_scaling_beta": 2.0, "original_max_position_embeddings": 150}
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4} | scales

    def new_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return add_noise(new(config).eval())

    prompts = random_prompts((160, 3, 20))
    expected = [greedy(new_model(), [prompt], 8)[0][0] for prompt in prompts]
    loaded = prepare_model(new_model(), "mistral4")
    keep_latents(loaded)
    assert {layer.kv_size for layer in loaded.layers} == {LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]}
    check_texts(loaded, prompts, expected)


def test_a_layer_whose_biases_cannot_be_joined_is_left(monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    model = model_of("plain queries")
    for layer in model.model.layers:
        linear = layer.self_attn.kv_a_proj_with_mqa
        linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))
    loaded = prepare_model(model, "deepseek_v3")
    assert not any(isinstance(layer.self_attn, FusedAttention) for layer in loaded.decoder_layers)
