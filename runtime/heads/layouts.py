"""The checkpoint layouts of the tools that train heads: tensor names, recognition of a layout, and errors for other
families.

A layout is recognised by its tensors first, and by its config if two tools use the same names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.layer import DecoderHeadConfig
from wingbeat.runtime.parts import first_result


class UnsupportedCheckpointError(CheckpointError):
    """A known but unsupported family of drafters; the message names it."""


class Family(StrEnum):
    """Kind of computation that a head performs."""

    EAGLE1 = "EAGLE-1"
    """EAGLE-1 heads; EAGLE-2 drafts its trees with the same weights."""
    EAGLE3 = "EAGLE-3"
    """EAGLE-3 heads, including EAGLE-3.1, which differs only in norms."""


class Theta(StrEnum):
    """Whether a tool's trainer uses the config's `rope_theta`, the base of plain RoPE."""

    READ = "read"
    SOMETIMES_IGNORED = "sometimes ignored"
    """Some versions of the tool train with the default base regardless of the config."""
    IGNORED = "ignored"
    """All known versions of the tool train with the default base regardless of the config."""


@dataclass(frozen=True)
class Layout:
    """Tensor names and conventions of one tool."""

    name: str
    family: Family
    layer: str
    """Prefix of the decoder layer's tensor names."""
    nested_config: bool = False
    """Whether the decoder layer's config is nested inside the head's."""
    ignored: tuple[str, ...] = ()
    """Tensors that are copies of the verifier's tensors and not part of the head."""
    may_norm_before_residual: bool = False
    """Whether the tool trains heads with and without `norm_before_residual`, so that a config without the field is
    ambiguous.
    """
    bias_on_output: bool = False
    """Whether `attention_bias` also covers the output projection, as in transformers' Llama."""
    norm_output_changed: bool = False
    """Whether `norm_output: true` has another meaning in files of the tool's older versions: the final norm before the
    logits, which all EAGLE-3 heads have.
    """
    rope_theta: Theta = Theta.READ


SAFEAILAB_1 = Layout("SafeAILab", Family.EAGLE1, "layers.0.")
SAFEAILAB = Layout("SafeAILab", Family.EAGLE3, "midlayer.", rope_theta=Theta.SOMETIMES_IGNORED)
SPECFORGE = Layout(
    "SpecForge", Family.EAGLE3, "midlayer.", norm_output_changed=True, rope_theta=Theta.SOMETIMES_IGNORED
)
ANGELSLIM = Layout("AngelSlim", Family.EAGLE3, "midlayer.", rope_theta=Theta.IGNORED)
SPECULATORS = Layout(
    "speculators",
    Family.EAGLE3,
    "layers.0.",
    nested_config=True,
    ignored=("verifier_norm.weight", "verifier_lm_head.weight"),
    may_norm_before_residual=True,
    bias_on_output=True,
)
MODELOPT = Layout("ModelOpt", Family.EAGLE3, "layers.0.", bias_on_output=True)

_IN_LAYER = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
_IN_ATTENTION = ("q_norm", "k_norm", "o_proj", "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
_IN_ATTENTION += ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")


def recognise(raw: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """The layout of a checkpoint, from its config and tensor names.

    Raises:
        UnsupportedCheckpointError: the checkpoint is of a known family that is not supported.
        CheckpointError: the tensors are not those of a head.
    """
    names = tuple(names)
    if (error := first_result("other_family", raw, names)) is not None:
        raise error
    architectures = str(raw.get("architectures") or "")
    if any(name.startswith("midlayer.") for name in names):
        if "Eagle3LlamaForCausalLM" in architectures:
            return ANGELSLIM
        written_by_specforge = "LlamaForCausalLMEagle3" in architectures or "eagle_config" in raw
        return SPECFORGE if written_by_specforge else SAFEAILAB
    if not any(name.startswith("layers.0.") for name in names):
        raise CheckpointError("no EAGLE head: there are neither midlayer.* nor layers.0.* tensors")
    if not is_eagle3(names):
        return SAFEAILAB_1
    return SPECULATORS if speculators_type(raw) or "transformer_layer_config" in raw else MODELOPT


def holds_head(raw: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a folder holds a draft head, supported or not, rather than a whole language model."""
    names = tuple(names)
    return first_result("other_family", raw, names) is not None or any(
        name.startswith(("midlayer.", "layers.0.")) for name in names
    )


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensor names are those of an EAGLE-3 head rather than of an EAGLE-1 head."""
    return any(name in ("norm.weight", "d2t") or name.endswith(".hidden_norm.weight") for name in names)


def speculators_type(raw: Mapping[str, Any]) -> str:
    """Lower-case value of the config field `speculators_model_type`; empty if absent."""
    return str(raw.get("speculators_model_type") or "").lower()


def file_tensors(layout: Layout, config: DecoderHeadConfig, canonical: str, tensor: Tensor) -> dict[str, Tensor]:
    """Splits a tensor of a head into the tensors of the layout, by name in the file, in the order in which they are
    concatenated.
    """
    if canonical.startswith("behind."):
        _, index, rest = canonical.split(".", 2)
        return file_tensors(replace(layout, layer=f"layers.{int(index) + 1}."), config, rest, tensor)
    module, _, kind = canonical.rpartition(".")
    if module == "qkv_proj":
        key_value = config.num_key_value_heads * config.head_dim
        parts = tensor.split([config.num_attention_heads * config.head_dim, key_value, key_value])
        return {f"{layout.layer}self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
    if module == "gate_up_proj":
        gate, up = tensor.chunk(2)
        return {f"{layout.layer}mlp.gate_proj.{kind}": gate, f"{layout.layer}mlp.up_proj.{kind}": up}
    if module == "down_proj":
        return {f"{layout.layer}mlp.{canonical}": tensor}
    if module in _IN_ATTENTION:
        return {f"{layout.layer}self_attn.{canonical}": tensor}
    return {f"{layout.layer}{canonical}" if module in _IN_LAYER else canonical: tensor}
