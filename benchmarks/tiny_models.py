"""Small random models of every causal LM in transformers, which decode in milliseconds and have short windows.

A class's default configuration is kept, with its sizes replaced by name; per-layer lists are cut to few layers that
cover every kind. Weights are random and large enough that the best token stands out.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

WINDOW = 8
VOCAB_SIZE = 128
_NUM_LAYERS, _HIDDEN_SIZE, _NUM_HEADS, _HEAD_DIM = 4, 64, 4, 16

_SIZES = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), _HIDDEN_SIZE),
    **dict.fromkeys(("rnn_hidden_size", "lru_width", "attention_hidden_size", "emb_dim"), _HIDDEN_SIZE),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dim_ff", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "mlp_intermediate_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_intermediate_size"), 32),
    # layers
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), _NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), _NUM_LAYERS),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _NUM_HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), _NUM_HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), _NUM_HEADS),
    **dict.fromkeys(("swa_num_attention_heads",), _NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "v_head_dim", "swa_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("global_head_dim", "swa_v_head_dim", "d_kv", "dim_head", "attention_head_size"), _HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads"), 2),
    **dict.fromkeys(("qk_nope_head_dim",), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 24),
    "query_pre_attn_scalar": 16,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "topk_groups", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    # recurrent parts
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "ssm_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_ssm"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    # windows and positions
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("max_window_layers",), 2),
    "local_attention": 2 * WINDOW,
    "attention_chunk_size": 64,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    # vocabulary
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCAB_SIZE),
    "hidden_size_per_layer_input": 8,
    "encoder_hash_byte_group_vocab": 100,
}
"""Sizes by the names that configuration classes use."""
_SETTINGS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "use_sliding_window": True,
    "initializer_range": 0.2,
}
_TWO_KINDS = ["linear_attention", "full_attention"] * 2
_WINDOW_AND_FULL = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "layer_types": _WINDOW_AND_FULL,
    "num_kv_shared_layers": 0,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "layers_block_type": None},
    "granitemoehybrid": {"layer_types": _TWO_KINDS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": _WINDOW_AND_FULL,
        "activation_sparsity_pattern": [0.0] * _NUM_LAYERS,
        "laurel_rank": 8,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "cohere_compass_text": {
        "layer_types": _WINDOW_AND_FULL,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE | {"mrope_section": [4, 2, 2]}),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": _HIDDEN_SIZE, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    },
    "phimoe": {"sliding_window": WINDOW},
    "qwen2_moe": {"layer_types": _WINDOW_AND_FULL},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 16), "attn_layers": ["local"] * 4},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "layers_block_type": None},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "minimax": {"layer_types": _TWO_KINDS},
}
"""Fields by model type that the general rules do not cover."""


def model_types() -> list[str]:
    """All model types that have a causal LM, sorted."""
    return sorted(config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING)


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Creates a random model of a type, in float32.

    Raises:
        Exception: whatever the class raises if the sizes do not fit it.
    """
    kind = next(config for config in MODEL_FOR_CAUSAL_LM_MAPPING if config.model_type == model_type)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32).eval()
    _spread(model)
    model.generation_config = GenerationConfig()
    return model


def tiny_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """Default configuration of a class, with small sizes."""
    return kind(**_tiny_fields(kind()))


def _tiny_fields(config: PretrainedConfig) -> dict[str, Any]:
    given = config.to_dict()
    fields: dict[str, Any] = {}
    for name, value in given.items():
        nested = vars(config).get(name)
        if isinstance(nested, PretrainedConfig):
            fields[name] = type(nested)(**_tiny_fields(nested))
        elif name in _SIZES and isinstance(value, int | None) and not isinstance(value, bool):
            fields[name] = _SIZES[name] if value is not None or "window" not in name else WINDOW
        elif name in _SETTINGS:
            fields[name] = _SETTINGS[name]
        elif isinstance(value, list) and name != "architectures" and len(value) == _num_layers(config):
            fields[name] = _few(value)
        elif isinstance(value, dict) and "rope" in name and value:
            fields[name] = value
    if given.get("kv_lora_rank"):
        # Latent attention has a key per head, and head_dim is the width of the key's rotated part.
        fields |= {"num_key_value_heads": _NUM_HEADS, "head_dim": _SIZES["qk_rope_head_dim"]}
    fields = {name: value for name, value in fields.items() if name != "per_layer_config"}
    fields |= _SPECIAL.get(config.model_type, {})
    return {name: value for name, value in fields.items() if value is not None}


def _num_layers(config: PretrainedConfig) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return None


def _few(by_layer: list[Any]) -> list[Any]:
    """Values of few layers that cover every kind."""
    kinds = list(dict.fromkeys(map(str, by_layer)))
    if set(map(str, by_layer[:_NUM_LAYERS])) == set(kinds):
        return by_layer[:_NUM_LAYERS]
    first = [next(value for value in by_layer if str(value) == kind) for kind in kinds]
    return (first * _NUM_LAYERS)[:_NUM_LAYERS]


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Perturbs weights that are initialised to constants or tiny numbers, so that the model tells tokens and positions
    apart.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1 and float(parameter.std()) < 0.1:
            parameter.copy_(0.2 * noise)
        elif parameter.dim() == 1:
            parameter.add_(0.1 * noise)
