"""Tiny random verifiers with recurrent or convolution state, and the texts that transformers generates with them."""

from collections.abc import Iterable
from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import Cache

from tests.optional import FEATURES, is_deleted
from tests.runtime.models import VOCAB_SIZE, Reference, add_noise, greedy, random_prompts
from wingbeat.runtime.verifier.loading.loader import prepare_model

needs_states = pytest.mark.skipif(
    is_deleted(FEATURES["states"]) or not hasattr(Cache, "get_conv_state"),
    reason="states are deleted, or transformers is one before 5.21: hybrids are refused",
)
MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
PROMPT_LENS = (5, 27, 1)
NUM_TOKENS = 40
_KINDS = ["linear_attention", "full_attention"] * 2
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_DELTA = {
    "head_dim": 16,
    "layer_types": _KINDS,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_MULTIPLIERS = {
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.1,
    "key_multiplier": 0.7,
    "mlp_multipliers": [0.9, 1.2],
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_out_multiplier": 1.2,
}
"""Factors of Falcon-H1; none is 1."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

SHAPES = {"qwen3_5": _SHAPE | _DELTA}
"""Shapes of models whose text configuration is part of another configuration."""

CONFIGS = {
    "lfm2": lambda: Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"] * 2),
    "qwen3_next": lambda: Qwen3NextConfig(**_SHAPE, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_SHAPE, **_DELTA),
    "bamba": lambda: BambaConfig(**_SHAPE, **_MAMBA2, attn_layer_indices=[1, 3]),
    "granite": lambda: GraniteMoeHybridConfig(
        **_SHAPE,
        **_MAMBA2,
        layer_types=_KINDS,
        num_local_experts=4,
        shared_intermediate_size=32,
        residual_multiplier=0.8,
    ),
    "falcon_h1": lambda: FalconH1Config(**_SHAPE, **_MAMBA2, **_MULTIPLIERS, mamba_d_ssm=128, head_dim=16),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: value for name, value in _SHAPE.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "moe", "attention", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "jamba": lambda: JambaConfig(
        **_SHAPE, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8, num_experts=2, num_experts_per_tok=1
    ),
}
"""Short convolutions, gated delta nets, Mamba-2 alone and beside attention, Mamba-1."""


def random_hybrid(name: str, num_layers: int | None = None, experts: bool = True) -> PreTrainedModel:
    """A verifier whose random weights are all far from zero.

    Args:
        num_layers: its first ones; None has all of them.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]() if num_layers is None else of_layers(name, range(num_layers))
    if not experts and hasattr(config, "num_experts"):
        config.num_experts = 1
    return add_noise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def of_layers(name: str, layers: Iterable[int]) -> PreTrainedConfig:
    """Config of CONFIGS with one layer for each index in `layers`, of the same kind as that layer."""
    config, layers = CONFIGS[name](), list(layers)
    kinds = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    if name == "bamba":
        config.attn_layer_indices = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    elif {"layer_types", "layers_block_type"} & vars(config).keys():  # otherwise all layers are of one kind
        config.layer_types = kinds
    return config


@cache
def hybrid(name: str) -> Reference:
    """A model of CONFIGS with random prompts, each continued alone, so that no padding occurs."""
    loaded = prepare_model(random_hybrid(name), name)
    prompts = random_prompts(PROMPT_LENS)
    alone = [greedy(loaded.model, [prompt], NUM_TOKENS) for prompt in prompts]
    return Reference(name, loaded, prompts, [texts[0] for texts, _ in alone], min(gap for _, gap in alone))
