"""Writes heads as checkpoints in the layouts of SpecForge, speculators and SafeAILab, which other engines load too."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.heads.conventions import state
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.layer import DecoderHead, DecoderHeadConfig
from wingbeat.runtime.heads.layouts import SAFEAILAB_1, SPECFORGE, SPECULATORS, Layout, file_tensors
from wingbeat.runtime.tensor_files import SAFETENSORS

_SHAPE_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPE_FIELDS += ("vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias")
_AXES_FIELDS = ("mrope_section", "mrope_interleaved")
_CHAIN_TOKENS = 5

WRITABLE = {"specforge": SPECFORGE, "speculators": SPECULATORS, "safeailab": SAFEAILAB_1}
"""Layouts by the names that users pass."""


def save_eagle_head(
    head: EagleHead | Eagle1Head,
    path: str | Path,
    *,
    layout: str | None = None,
    with_embedding: bool = True,
    verifier: str | None = None,
) -> None:
    """Write config.json and model.safetensors (bfloat16).

    Args:
        head: the head.
        path: folder to write.
        layout: "specforge" or "speculators" for EAGLE-3, "safeailab" for EAGLE-1; None means the first of these layouts
            that can represent the head's family.
        with_embedding: False omits `embed_tokens`; a loader then uses the target's.
        verifier: folder or hub name of the target, which the speculators layout records.

    Raises:
        ValueError: the layout cannot represent this head; the message names the missing fields.
    """
    chosen = _layout_for(head, layout)
    write_checkpoint(Path(path), _tensors(head, chosen, with_embedding), _raw_config(head, chosen, verifier))


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], raw: dict[str, Any]) -> None:
    """Write model.safetensors and config.json; each file is written atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    writers: dict[str, Callable[[Path], object]] = {
        SAFETENSORS: lambda file: save_file(tensors, file, metadata={"format": "pt"}),
        "config.json": lambda file: file.write_text(json.dumps(raw, indent=2) + "\n"),
    }
    for name, write in writers.items():
        with replacing(folder / name) as temporary:
            write(temporary)


def _layout_for(head: EagleHead | Eagle1Head, name: str | None) -> Layout:
    fitting = ("safeailab",) if isinstance(head, Eagle1Head) else ("specforge", "speculators")
    name = name or fitting[0]
    if name not in fitting:
        family = "EAGLE-1" if isinstance(head, Eagle1Head) else "EAGLE-3"
        raise ValueError(f"layout={name!r} cannot hold an {family} head: {' or '.join(fitting)} can")
    config = head.config
    check_turning(config)
    lacks = {
        "specforge": ("qk_norm", "norm_before_fc", "attention_bias", "norm_before_residual", "fc_bias"),
        "speculators": ("fc_bias",),
        "safeailab": ("qk_norm", "output_bias"),
    }[name]
    wrong = [field for field in lacks if getattr(config, field, False)]
    if name == "speculators" and config.output_bias != config.attention_bias:
        wrong.append("output_bias")
    if wrong:
        raise ValueError(f"layout={name!r} has no {', '.join(wrong)}: other engines would read the head wrong")
    return WRITABLE[name]


def check_turning(config: DecoderHeadConfig) -> None:
    """Raise an error for a head whose weights were permuted when the head was loaded.

    Raises:
        ValueError: the weights were permuted; the message names the config field that requires this.
    """
    for field in ("rotary_dim", "rope_interleaved"):
        if getattr(config, field):
            raise ValueError(f"{field}={getattr(config, field)}: heads with this setting can be loaded, but not saved")


def _tensors(head: DecoderHead, layout: Layout, with_embedding: bool) -> dict[str, Tensor]:
    config = head.config
    left_out = {"draft_token_ids"} | (set() if with_embedding else {"embed_tokens.weight"})
    if layout is SAFEAILAB_1:
        left_out.add("lm_head.weight")
    tensors = {
        name: part.to("cpu", torch.bfloat16)
        for canonical, tensor in head.state_dict().items()
        if canonical not in left_out
        for name, part in file_tensors(layout, config, canonical, tensor).items()
    }
    token_ids = head.draft_token_ids.cpu()
    # The speculators layout has no token map if the head drafts the whole vocabulary.
    needs_map = layout is SPECFORGE or not torch.equal(token_ids, torch.arange(config.vocab_size))
    if layout is not SAFEAILAB_1 and needs_map:
        tensors |= token_map(token_ids, config.vocab_size)
    return tensors


def token_map(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors d2t and t2d of a checkpoint whose head drafts the target ids int64 [draft_vocab_size]."""
    token_ids = token_ids.cpu()
    return {
        "d2t": token_ids - torch.arange(len(token_ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True),
    }


def _raw_config(head: EagleHead | Eagle1Head, layout: Layout, verifier: str | None) -> dict[str, Any]:
    if isinstance(head, Eagle1Head):
        return decoder_fields(head.config, "llama") | {
            "architectures": ["LlamaForCausalLM"],
            "bias": head.config.fc_bias,
        }
    written = speculators_fields(head.config, verifier) if layout is SPECULATORS else _specforge(head.config)
    # The RoPE base that the head uses is written as the config's base, so that other tools also use that base.
    if not head.config.embeds_media:
        written["embeds_media"] = False
    return written | state(head.convention._replace(rope_theta=None))


class DecoderShape(Protocol):
    """The fields of a head's config that describe a decoder layer."""

    @property
    def rope_parameters(self) -> Mapping[str, Any]:
        """RoPE fields as in config.json."""


def decoder_fields(config: DecoderShape, model_type: str) -> dict[str, Any]:
    """The fields of config.json that describe a head's decoder layers."""
    rope, sections = dict(config.rope_parameters), getattr(config, "mrope_section", ())
    if sections:
        rope |= {name: getattr(config, name) for name in _AXES_FIELDS}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "model_type": model_type,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in _SHAPE_FIELDS},
        # The fields are written in both forms, because transformers 4 reads only `rope_theta` and `rope_scaling`.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" and not sections else scaling,
    }


def _specforge(config: EagleHeadConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **decoder_fields(config, "llama"),
        "dtype": "bfloat16",
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.tap_layers],
        },
    }


def speculators_fields(config: EagleHeadConfig, verifier: str | None, kind: str = "eagle3") -> dict[str, Any]:
    """config.json of a head in the speculators format; `kind` is its speculators_model_type."""
    body = "qwen3" if config.qk_norm else "llama"
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": kind,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "transformer_layer_config": decoder_fields(config, body),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _CHAIN_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
