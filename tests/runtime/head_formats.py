"""Tiny heads written to disk as each training tool writes them: tensor names, config fields and file type."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.runtime.eagle_formula import Latent, Recipe

VOCAB, NUM_LAYERS = 97, 8
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_TOP = {"fc": "fc.weight", "fc_bias": "fc.bias", "norm": "norm.weight", "lm_head": "lm_head.weight"}
_TOP |= {"embed": "embed_tokens.weight", "input_norm": "input_norm.weight", "d2t": "d2t"}
_LAYER = {"hidden_norm": "hidden_norm", "input_norm_of_layer": "input_layernorm"}
_LAYER |= {"post_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj"}
_LAYER |= {"down": "mlp.down_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_LAYER |= {n: f"self_attn.{n}_proj" for n in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")}
_LAYER |= {"kv_a": "self_attn.kv_a_proj_with_mqa", "q_a_norm": "self_attn.q_a_layernorm"}
_LAYER |= {"kv_a_norm": "self_attn.kv_a_layernorm"}


@dataclass(frozen=True)
class Format:
    """A tool's format of a head's folder."""

    layer: str
    config: dict[str, Any]
    recipe: Recipe = field(default_factory=Recipe)
    draft_vocab: int = 40
    taps: tuple[int, ...] = (2, 4, 5)
    """Layers whose inputs the head reads, as the engine must derive them from the config."""
    file: str = "model.safetensors"
    leaves_out: tuple[str, ...] = ()
    """Weights that are absent from the file because the target lends them."""
    extra: tuple[str, ...] = ()
    """Tensors that the tool writes and no head needs."""
    with_mask: bool = True

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """The checkpoint's files."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {self.name_of(name): value for name, value in weights.items() if name not in self.leaves_out}
        if "d2t" in weights and self.with_mask:
            chosen = weights["d2t"] + torch.arange(self.draft_vocab)
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
        tensors |= {name: torch.randn(3) for name in self.extra}
        if self.file == "shards":
            self._write_shards(folder, tensors)
        elif self.file.endswith(".bin"):
            torch.save(tensors, folder / self.file)
        else:
            save_file(tensors, folder / self.file)
        (folder / "config.json").write_text(json.dumps(self.config))

    def name_of(self, name: str) -> str:
        """A weight's name in the file."""
        if name in _TOP:
            return _TOP[name]
        if name.startswith("fc_norm."):
            return f"{name}.weight"
        index, _, own = name.removesuffix("_bias").rpartition(".")
        layer = f"layers.{index}." if index else self.layer
        return f"{layer}{_LAYER[own]}.{'bias' if name.endswith('_bias') else 'weight'}"

    @staticmethod
    def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
        names = sorted(tensors)
        index = {}
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            file = f"model-{number:05d}-of-00002.safetensors"
            save_file({name: tensors[name] for name in part}, folder / file)
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def llama_fields(recipe: Recipe, **more: Any) -> dict[str, Any]:
    """The fields of a Llama config with one layer, as the fourth major version of transformers wrote them."""
    fields = {
        "hidden_act": "silu",
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": recipe.eps,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "head_dim": recipe.head_dim,
    }
    return fields | more


def speculators_fields(recipe: Recipe, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A speculators config around a decoder layer's."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": 40,
        "transformer_layer_config": llama_fields(recipe, **body),
        "norm_before_residual": recipe.norm_before_residual,
        "norm_before_fc": recipe.norm_before_fc,
        "fc_norm": recipe.fc_norm,
        "norm_output": recipe.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
    } | more


_PLAIN, _ONE = Recipe(), Recipe(family=1, num_taps=1, theta=1e6)
_BIASED_ONE = Recipe(family=1, num_taps=1, fc_bias=True, qkv_bias=True)
_3_1 = Recipe(fc_norm=True, norm_output=True)
_WIDE = Recipe(target_hidden=30)
_RESIDUAL = Recipe(norm_before_residual=True, llama3=LLAMA3, theta=5e5)
_QWEN = Recipe(qk_norm=True, fc_norm=True, norm_output=True, norm_before_residual=True, theta=1e6)
_BEFORE_FC = Recipe(norm_before_fc=True, num_taps=4)
_BIASES = Recipe(fc_bias=True, qkv_bias=True, o_bias=True)
_LATENT = Recipe(latent=Latent(), interleaved=True, theta=5e4)
_LATENT_FIELDS = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_PARTIAL = Recipe(rotary_dim=4, qk_norm=True)
_DEEP = Recipe(num_layers=3)
_INTERLEAVED = Recipe(interleaved=True, rotary_dim=6)
_MROPE = Recipe(theta=1e6)
_MIDDLE = {"low": 1, "middle": 3, "high": 4}
_OUTPUTS = {"eagle_aux_hidden_state_layer_ids": list(_MIDDLE.values()), "use_aux_hidden_state": True}

FORMATS: dict[str, Format] = {
    "eagle1": Format(
        "layers.0.",
        llama_fields(_ONE, architectures=["LlamaForCausalLM"], bias=False, rope_theta=1e6),
        _ONE,
        draft_vocab=VOCAB,
        taps=(NUM_LAYERS,),
        leaves_out=("lm_head", "embed"),
    ),
    "eagle1-biases-own-embedding": Format(
        "layers.0.",
        llama_fields(_BIASED_ONE, architectures=["LlamaForCausalLM"], qkv_bias=True),
        _BIASED_ONE,
        draft_vocab=VOCAB,
        taps=(NUM_LAYERS,),
        file="pytorch_model.bin",
        leaves_out=("lm_head",),
        extra=("layers.0.self_attn.rotary_emb.inv_freq",),
    ),
    "safeailab": Format(
        "midlayer.",
        llama_fields(_PLAIN, architectures=["LlamaForCausalLM"], draft_vocab_size=40),
        file="pytorch_model.bin",
        leaves_out=("embed",),
    ),
    "specforge": Format(
        "midlayer.",
        llama_fields(_PLAIN, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, eagle_config=_OUTPUTS),
    ),
    "specforge-3.1": Format(
        "midlayer.",
        llama_fields(
            _3_1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, fc_norm=True, norm_output=True
        ),
        _3_1,
    ),
    "specforge-wide": Format(
        "midlayer.",
        llama_fields(
            _WIDE,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=40,
            target_hidden_size=30,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 6]},
        ),
        _WIDE,
        taps=(1, 3, 7),
        file="shards",
    ),
    "speculators": Format(
        "layers.0.",
        speculators_fields(
            _RESIDUAL,
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        ),
        _RESIDUAL,
        leaves_out=("embed",),
        extra=("verifier_norm.weight",),
    ),
    "speculators-plain": Format(
        "layers.0.",
        speculators_fields(_PLAIN, {}, eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
    ),
    "speculators-qwen3-3.1": Format(
        "layers.0.",
        speculators_fields(
            _QWEN,
            {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            draft_vocab_size=VOCAB,
            eagle_aux_hidden_state_layer_ids=[1, 3, 6],
            target_hidden_size=24,
        ),
        _QWEN,
        draft_vocab=VOCAB,
        taps=(1, 3, 6),
        leaves_out=("lm_head", "embed"),
    ),
    "speculators-norm-before-fc": Format(
        "layers.0.",
        speculators_fields(_BEFORE_FC, {}, eagle_aux_hidden_state_layer_ids=[1, 3, 5, 7]),
        _BEFORE_FC,
        taps=(1, 3, 5, 7),
    ),
    "modelopt": Format(
        "layers.0.",
        llama_fields(
            _BIASES,
            architectures=["LlamaForCausalLMEagle3"],
            attention_bias=True,
            draft_vocab_size=40,
            mlp_bias=False,
            rope_scaling=None,
            use_cache=None,
            eagle_config=_OUTPUTS
            | {
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            },
        ),
        _BIASES,
        leaves_out=("embed",),
        with_mask=False,
    ),
    "modelopt-plain": Format(
        "layers.0.",
        llama_fields(_PLAIN, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, eagle_config=_OUTPUTS),
        with_mask=False,
    ),
    "latent": Format(
        "midlayer.",
        llama_fields(
            _LATENT,
            **_LATENT_FIELDS,
            architectures=["Eagle3DeepseekV2ForCausalLM"],
            model_type="kimi_k2",
            draft_vocab_size=40,
            rope_theta=5e4,
            eagle_config=_OUTPUTS,
        ),
        _LATENT,
        leaves_out=("embed",),
    ),
    "partial-rotary": Format(
        "midlayer.",
        llama_fields(
            _PARTIAL,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=40,
            partial_rotary_factor=0.5,
            eagle_config=_OUTPUTS,
        ),
        _PARTIAL,
    ),
    "interleaved-rotary": Format(
        "midlayer.",
        llama_fields(
            _INTERLEAVED,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=40,
            rotary_dim=6,
            is_neox_style=False,
            eagle_config=_OUTPUTS,
        ),
        _INTERLEAVED,
    ),
    "several-layers": Format(
        "midlayer.",
        llama_fields(
            _DEEP,
            num_hidden_layers=3,
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=40,
            eagle_config=_OUTPUTS,
        ),
        _DEEP,
        leaves_out=("embed",),
    ),
    "angelslim": Format(
        "midlayer.",
        llama_fields(_PLAIN, architectures=["Eagle3LlamaForCausalLM"], target_model_type="qwen3", draft_vocab_size=40),
        file="pytorch_model.bin",
        leaves_out=("embed",),
    ),
    "angelslim-theta": Format(
        # SpecForge's trainer uses the default base, whatever the config says.
        "midlayer.",
        llama_fields(
            _PLAIN,
            architectures=["Eagle3LlamaForCausalLM"],
            target_model_type="qwen3",
            draft_vocab_size=40,
            rope_theta=1000000,
            rope_scaling=None,
        ),
        leaves_out=("embed",),
    ),
    "angelslim-mrope": Format(
        "midlayer.",
        llama_fields(
            _MROPE,
            architectures=["Eagle3LlamaForCausalLM"],
            target_model_type="qwen2_5_vl",
            draft_vocab_size=40,
            rope_theta=1e6,
            rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
            modal_type="VLM",
        ),
        _MROPE,
        leaves_out=("embed",),
    ),
}
