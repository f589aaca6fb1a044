"""Builds config.json of the model in a GGUF file, for the supported llama.cpp architectures.

An unknown field raises an error, so that no property of a model that a file states is ignored.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.quantised.gguf_file import GgufFile, GgufTensor
from wingbeat.runtime.tensor_files import ModelCheckpointError

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ROPE = (
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
_READ = frozenset({*_SIZES, *_ROPE, "vocab_size", "attention.key_length", "attention.value_length"})
_WITHOUT_EFFECT = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "attention.causal"})
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1 and 3.2. GGUF files do not contain these fields; instead they contain a factor for each
frequency.
"""
_WHOLE_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERTS = _WHOLE_EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SHARED_EXPERTS = _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


HEAD = "eagle3"
"""Architecture of draft heads, see `gguf_head`."""


class Contents(NamedTuple):
    """Fields of a file by name without the architecture prefix, and tensors by name."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def head_dim(self) -> int:
        return self.fields.get("attention.key_length") or (
            self.fields["embedding_length"] // self.fields["attention.head_count"]
        )


def _llama(head: Contents) -> dict[str, Any]:
    """Config of Llama or Mixtral; files of both have the architecture name `llama`."""
    return {"model_type": "mixtral"} if head.fields.get("expert_count") else _biases(head)


def _biases(head: Contents) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in head.tensors, "mlp_bias": "blk.0.ffn_up.bias" in head.tensors}


def _granite(head: Contents) -> dict[str, Any]:
    # Only in Granite files does `rope.scaling.finetuned` mean, in llama.cpp, that a model uses RoPE.
    if head.fields.get("rope.scaling.finetuned", True) is False:
        raise ValueError("rope.scaling.finetuned is False: layers without RoPE are not supported")
    return _biases(head)


def _qwen2_moe(head: Contents) -> dict[str, Any]:
    """Config of Qwen2-MoE; for widths that the file does not state, llama.cpp's defaults are used."""
    whole, used = head.fields["feed_forward_length"], head.fields["expert_used_count"]
    widths = {"moe_intermediate_size": whole // used, "shared_expert_intermediate_size": whole}
    said = {own: head.fields[name] for name, own in _SHARED_EXPERTS.items() if name in head.fields}
    return {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], **widths, **said}


def _qwen3_moe(head: Contents) -> dict[str, Any]:
    return {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _olmoe(head: Contents) -> dict[str, Any]:
    return {"norm_topk_prob": False}


def _gpt_oss(head: Contents) -> dict[str, Any]:
    angles = angles_of(head)
    # Models of this family do not round YaRN's blending range, although their files do not state this.
    return {"rope_parameters": angles | ({"truncate": False} if angles["rope_type"] == "yarn" else {})}


def _gemma2(head: Contents) -> dict[str, Any]:
    return {"query_pre_attn_scalar": _scale_of_gemma(head, 46)}


def _gemma3(head: Contents) -> dict[str, Any]:
    angles = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": angles_of(head)}
    return {"query_pre_attn_scalar": _scale_of_gemma(head, 62), "rope_parameters": angles}


def _scale_of_gemma(head: Contents, largest: int) -> float:
    """Value of `query_pre_attn_scalar`, which GGUF files do not state.

    The largest model of a family has another value, and is recognised by its number of layers, as in llama.cpp.
    """
    if head.fields["block_count"] == largest:
        return head.fields["embedding_length"] / head.fields["attention.head_count"]
    return head.head_dim()


def _phi3(head: Contents) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rotated = head.fields.get("rope.dimension_count", head.head_dim())
    angles = {"rope_theta": head.fields.get("rope.freq_base", 10_000.0), "rope_type": "default"}
    angles["partial_rotary_factor"] = rotated / head.head_dim()
    if "rope_factors_long.weight" in head.tensors:
        original = head.fields["rope.scaling.original_context_length"]
        angles |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        angles |= {
            f"{which}_factor": head.tensors[f"rope_factors_{which}.weight"].data.tolist() for which in ("short", "long")
        }
        found["original_max_position_embeddings"] = original
    return found | {"rope_parameters": angles}


class _Architecture(NamedTuple):
    """Describes an architecture in transformers' terms."""

    model_type: str
    fields: Mapping[str, str] = {}
    """Fields that only this architecture has: names in the file to names in the config."""
    more: Callable[[Contents], dict[str, Any]] = lambda head: {}
    has_head_dim: bool = True
    tensors_of: str | None = None
    """Architecture with the same tensor layout, passed to transformers' reader; None means the architecture itself."""
    names: Mapping[str, str] = {}
    """Layer tensors that transformers' reader does not find: names in the file to names in transformers."""


ARCHITECTURES = {
    "llama": _Architecture("llama", _LOCAL_EXPERTS, _llama),
    "qwen2": _Architecture("qwen2", has_head_dim=False),
    "qwen3": _Architecture("qwen3"),
    "qwen2moe": _Architecture("qwen2_moe", _SHARED_EXPERTS, _qwen2_moe, has_head_dim=False),
    "qwen3moe": _Architecture("qwen3_moe", _EXPERTS, _qwen3_moe),
    "gemma2": _Architecture("gemma2", _WINDOW | _CAPS, _gemma2),
    "gemma3": _Architecture("gemma3_text", _WINDOW | _CAPS, _gemma3),
    "phi3": _Architecture("phi3", _WINDOW, _phi3, has_head_dim=False),
    "olmoe": _Architecture("olmoe", _WHOLE_EXPERTS | {"attention.clamp_kqv": "clip_qkv"}, _olmoe, has_head_dim=False),
    "smollm3": _Architecture("smollm3", more=_biases, has_head_dim=False, tensors_of="llama"),
    "granite": _Architecture("granite", _MULTIPLIERS, _granite, has_head_dim=False, tensors_of="llama"),
    "granitemoe": _Architecture(
        "granitemoe",
        _MULTIPLIERS | _LOCAL_EXPERTS,
        _granite,
        has_head_dim=False,
        tensors_of="llama",
        names={"ffn_gate_inp.weight": "block_sparse_moe.router.weight"},
    ),
    "gpt-oss": _Architecture(
        "gpt_oss",
        _WINDOW | _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        _gpt_oss,
        names={"attn_sinks.weight": "self_attn.sinks"},
    ),
}
"""Architectures by `general.architecture`."""


def config_of(file: GgufFile, name: str) -> dict[str, Any]:
    """The fields of config.json.

    Args:
        file: the file's content.
        name: name of the file, for errors.

    Raises:
        ModelCheckpointError: the architecture or one of its fields is not supported; the message names the architecture
            or the field.
    """
    architecture = file.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelCheckpointError(f"{name} has an unsupported architecture: {', '.join(ARCHITECTURES)} are supported")
    known = ARCHITECTURES[architecture]
    fields, _ = fields_of(file, name, known.fields)
    head = Contents(fields, {tensor.name: tensor for tensor in file.tensors})
    try:
        return _config(known, head, file)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelCheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def fields_of(file: GgufFile, name: str, own: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the file without the architecture prefix, and the size fields under their config names.

    Args:
        file: the file's content.
        name: name of the file, for errors.
        own: fields that only this architecture may have.

    Raises:
        ModelCheckpointError: a field is missing or unknown; the message names the field.
    """
    prefix = f"{file.fields.get('general.architecture')}."
    fields = {key.removeprefix(prefix): value for key, value in file.fields.items() if key.startswith(prefix)}
    strange = sorted(fields.keys() - _READ - _WITHOUT_EFFECT - set(own))
    if strange:
        raise ModelCheckpointError(f"{name}: {prefix}{strange[0]} = {fields[strange[0]]!r} is not supported")
    missing = sorted(_SIZES.keys() - fields.keys() - {"attention.head_count_kv", "attention.layer_norm_rms_epsilon"})
    if missing:
        raise ModelCheckpointError(f"{name} has no field {prefix}{missing[0]}")
    return fields, {own: fields[key] for key, own in _SIZES.items() if key in fields}


def _config(known: _Architecture, head: Contents, file: GgufFile) -> dict[str, Any]:
    fields = head.fields
    for key in fields.keys() - {"rope.scaling.type", *_WITHOUT_EFFECT}:
        if type(fields[key]) not in (int, float):  # a list would mean a different size for each layer
            raise ValueError(f"{key} is {fields[key]!r}, not a number")
    config: dict[str, Any] = {own: fields[key] for key, own in _SIZES.items() if key in fields}
    config |= {own: fields[key] for key, own in known.fields.items() if key in fields}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if fields.get("attention.value_length", head.head_dim()) != head.head_dim():
        raise ValueError("keys and values of different width are not supported")
    embedding = head.tensors["token_embd.weight"]
    config |= {
        "model_type": known.model_type,
        "pad_token_id": None,
        "vocab_size": embedding.shape[1],
        "tie_word_embeddings": "output.weight" not in head.tensors,
    }
    if known.has_head_dim:
        config["head_dim"] = head.head_dim()
    elif head.head_dim() * config["num_attention_heads"] != config["hidden_size"]:
        raise ValueError(f"heads of width {head.head_dim()} do not add up to {config['hidden_size']}")
    more = known.more(head)
    if "rope_parameters" not in more:
        config["rope_parameters"] = angles_of(head)
    return config | more


def angles_of(head: Contents) -> dict[str, Any]:
    """The config's `rope_parameters`: base and scaling."""
    fields = head.fields
    angles = {"rope_theta": fields.get("rope.freq_base", 10_000.0), "rope_type": "default"}
    if fields.get("rope.dimension_count", head.head_dim()) != head.head_dim():
        raise ValueError("RoPE over a part of each head is not supported")
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor", 1.0)
    if kind == "yarn":
        original = fields["rope.scaling.original_context_length"]
        angles |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        angles |= {own: fields[name] for own, name in betas.items() if name in fields}
        angles["attention_factor"] = fields.get("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1)
    elif kind == "linear" and factor != 1:
        angles |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise ValueError(f"RoPE scaling {kind!r} is not supported")
    if (factors := head.tensors.get("rope_freqs.weight")) is not None:
        angles |= _by_factors(factors.data, head.head_dim(), angles["rope_theta"])
    return angles


def _by_factors(factors: np.ndarray, head_dim: int, base: float) -> dict[str, Any]:
    """RoPE scaling fields whose frequencies equal the base frequencies divided by a file's factors."""
    if (factors == 1).all():
        return {}
    rule = _LLAMA3 | {"rope_type": "llama3", "factor": float(factors.max())}
    periods = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = rule["original_max_position_embeddings"], rule["low_freq_factor"], rule["high_freq_factor"]
    smooth = np.clip((original / periods - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / rule["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError("rope_freqs.weight does not match Llama 3.1's RoPE scaling")
    return rule
