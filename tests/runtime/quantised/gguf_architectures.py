"""GGUF files of tiny random models of every architecture that is read, as llama.cpp's converter lays them out."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.runtime.quantised.gguf_world import TOKENS, turned, write_tokens

SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": len(TOKENS) - 1,
    "tie_word_embeddings": False,
}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": True}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "partial_rotary_factor": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    **{"beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 16},
}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama 3.1": ("llama", "llama", {"rope_parameters": _LLAMA3}),
    "llama, linear": ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, wide heads": ("llama", "llama", {"head_dim": 32}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2, yarn": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
    ),
    "gemma3": ("gemma3", "gemma3_text", _GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("phi3", "phi3", {"sliding_window": 24}),
    "phi3, long": ("phi3", "phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 256}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layer_interval": 4}),
    "granite": ("granite", "granite", _MULTIPLIERS),
    "mixtral": ("llama", "mixtral", _LOCAL_EXPERTS),
    "qwen2moe": (
        "qwen2moe",
        "qwen2_moe",
        {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    ),
    "olmoe": ("olmoe", "olmoe", _EXPERTS),
    "olmoe, clipped": ("olmoe", "olmoe", {**_EXPERTS, "clip_qkv": 0.5}),
    "granitemoe": ("granitemoe", "granitemoe", {**_LOCAL_EXPERTS, **_MULTIPLIERS}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {**_LOCAL_EXPERTS, "sliding_window": 16, "rope_parameters": _YARN}),
    "gpt-oss, plain": ("gpt-oss", "gpt_oss", {**_LOCAL_EXPERTS, "rope_parameters": {"rope_theta": 1e4}}),
}
"""By name: the architecture, the type of model, and fields of its config."""
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
}
_ALSO = {"num_experts": "num_local_experts"}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.clamp_kqv": "clip_qkv",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_TURNED = ("llama", "smollm3", "granite", "granitemoe")
_HALVES = {"gate_up_proj": ".weight", "gate_up_proj_bias": ".bias", "down_proj": ".weight", "down_proj_bias": ".bias"}
"""Parameters of experts, and how the names of their tensors end."""


def write_architecture(
    file: Path, case: str, form: str = "Q8_0", others: Mapping[str, str] = MappingProxyType({})
) -> PreTrainedModel:
    """Write a model, and return it with the numbers that its matrices stand for.

    Args:
        others: forms of some kinds of matrices, such as `ffn_up_exps`.
    """
    architecture, model_type, fields = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = GGUFWriter(str(file), architecture)
    for key, own in _KEYS.items():
        value = getattr(config, own, None) or getattr(config, _ALSO.get(own, own), None)
        if isinstance(value, int) and value:
            writer.add_uint32(f"{architecture}.{key}", value)
    for key, own in _FLOATS.items():
        if isinstance(value := getattr(config, own, None), int | float):
            writer.add_float32(f"{architecture}.{key}", value)
    head_dim = getattr(config, "head_dim", 16)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        writer.add_uint32(f"{architecture}.{key}", head_dim)
    angles = config.rope_parameters
    angles = angles.get("full_attention", angles)
    writer.add_float32(f"{architecture}.rope.freq_base", angles["rope_theta"])
    if angles["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{architecture}.rope.scaling.type", angles["rope_type"])
        writer.add_float32(f"{architecture}.rope.scaling.factor", angles["factor"])
    for key in ("beta_fast", "beta_slow"):
        if key in angles:
            writer.add_float32(f"{architecture}.rope.scaling.yarn_{key}", angles[key])
    if (original := angles.get("original_max_position_embeddings")) and angles["rope_type"] != "llama3":
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", original)
    if angles["rope_type"] == "llama3":
        plain = angles["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    if angles["rope_type"] == "longrope":
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(angles[f"{which}_factor"], np.float32))
    write_tokens(writer)
    _write_tensors(writer, model, architecture, lambda name: others.get(name.split(".")[-2], form))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@torch.no_grad()
def _write_tensors(writer: GGUFWriter, model: PreTrainedModel, architecture: str, form: Callable[[str], str]) -> None:
    config = model.config
    names = get_tensor_name_map(
        next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            _write_experts(writer, name, parameter, form, config.model_type == "gpt_oss")
            continue
        own = names.get_name(name, (".weight", ".bias"))
        if name.endswith("block_sparse_moe.router.weight"):
            own = f"blk.{name.split('.')[2]}.ffn_gate_inp.weight"
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
            own = f"{own}.weight" if own.endswith("sinks") else own
            writer.add_tensor(own, (parameter + 1 if architecture.startswith("gemma") else parameter).numpy())
            continue
        if own.endswith("ffn_gate_inp_shexp.weight"):  # the converter drops dimensions of one
            writer.add_tensor(own, parameter[0].numpy())
            continue
        count = heads.get(name.split(".")[-2]) if architecture in _TURNED else None
        _write_matrix(writer, own, parameter, "F32" if "gate_inp" in own else form(own), count)


def _write_experts(writer: GGUFWriter, name: str, parameter: Tensor, form: Callable[[str], str], in_turn: bool) -> None:
    """A parameter of experts; gpt-oss has inputs before columns, and gates and ups in turn."""
    layer, part = re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.(\w+)", name).groups()
    halves = {"down": parameter}
    if part.startswith("gate_up"):
        both = (parameter[..., ::2], parameter[..., 1::2]) if in_turn else parameter.chunk(2, dim=1)
        halves = dict(zip(("gate", "up"), both, strict=True))
    for kind, half in halves.items():
        own = f"blk.{layer}.ffn_{kind}_exps{_HALVES[part]}"
        if own.endswith(".bias"):
            half.copy_(torch.randn_like(half))
            writer.add_tensor(own, half.contiguous().numpy())
        else:
            _write_matrix(writer, own, half.mT if in_turn else half, form(own))


def _write_matrix(writer: GGUFWriter, name: str, parameter: Tensor, form: str, num_heads: int | None = None) -> None:
    kind = GGMLQuantizationType[form]
    blocks = quantize(parameter.contiguous().numpy(), kind)
    parameter.copy_(torch.from_numpy(dequantize(blocks, kind)))
    if num_heads is not None:
        blocks = turned(torch.from_numpy(blocks), num_heads).numpy()
    writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)
