"""Builds the canonical head config from the tensor shapes and the config.json of any layout.

Config and shapes must agree. If neither determines a field, the field gets the default of the tool that wrote the file.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import candidates, default_taps, is_valid, stated
from wingbeat.runtime.heads.eagle1 import Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.heads.files import CheckpointError, fields_refused, object_field
from wingbeat.runtime.heads.layer import DEFAULT_ROPE_THETA
from wingbeat.runtime.heads.layouts import Family, Layout, Theta, UnsupportedCheckpointError
from wingbeat.runtime.parts import first_result

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors by name in the file."""

_BODIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_MROPE_FIELDS = ("mrope_section", "mrope_interleaved")
_NOT_OF_ROPE = (*_MROPE_FIELDS, "partial_rotary_factor")
_BEHIND = re.compile(r"layers\.[1-9]\d*\.")
"""Matches tensors of decoder layers after the first."""
_FLAGS = ("norm_output", "norm_before_residual", "fc_norm", "norm_before_fc", "attention_bias", "qkv_bias", "mlp_bias")


def head_config(
    raw: Mapping[str, Any], layout: Layout, shapes: Shapes, target_hidden_size: int, convention: HeadConvention
) -> EagleHeadConfig | Eagle1HeadConfig:
    """The canonical config of a head under one convention. The result's `rope_theta` is the file's value, not the
    convention's; the loader sets the convention's value on the head.

    Raises:
        CheckpointError: a field is missing, does not fit the target, or is not supported; the message names the field.
    """
    body = _body(raw, layout, shapes)
    _check_flags(raw)
    _check_flags(body)
    _check_body(body)
    wide = raw.get("target_hidden_size") or target_hidden_size
    if wide != target_hidden_size:
        raise CheckpointError(f"target_hidden_size={wide} differs from the target's {target_hidden_size}")
    _check_fusion(layout, shapes, len(convention.tap_layers), target_hidden_size)
    with fields_refused():
        if layout.family is Family.EAGLE1:
            return Eagle1HeadConfig(
                **_decoder_fields(raw, body, layout, shapes, target_hidden_size), tap_layers=convention.tap_layers
            )
        fields, kind = _decoder_fields(raw, body, layout, shapes, target_hidden_size), EagleHeadConfig
        if body.get("kv_lora_rank") is not None or f"{layout.layer}self_attn.kv_b_proj.weight" in shapes:
            if (compressed := first_result("compressed_head", body, layout, shapes)) is None:
                raise CheckpointError("a head with compressed attention (MLA) is not supported")
            kind, fields = compressed[0], fields | compressed[1]
        return kind(
            **fields,
            tap_layers=convention.tap_layers,
            norm_output=convention.norm_output,
            norm_before_residual=convention.norm_before_residual,
            fc_norm=bool(raw.get("fc_norm")) or "fc_norm.0.weight" in shapes,
            norm_before_fc=bool(raw.get("norm_before_fc")) or "input_norm.weight" in shapes,
            num_layers=1 + len({name.split(".")[1] for name in shapes if _BEHIND.match(name)}),
        )


def conventions(
    raw: Mapping[str, Any], layout: Layout, shapes: Shapes, num_layers: int, target_hidden_size: int
) -> tuple[HeadConvention, ...]:
    """Conventions that a head's files allow, most likely first.

    Raises:
        CheckpointError: the tap layers do not exist in a target of `num_layers` layers, or cannot be determined.
    """
    if layout.family is Family.EAGLE1:
        return (HeadConvention((num_layers,)),)
    try:
        given = stated(raw)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error
    if given is not None:
        if not is_valid(given.tap_layers, num_layers):
            raise CheckpointError(f"taps enter layers {given.tap_layers}, not ascending in 0..{num_layers - 1}")
        return (given,)
    ids, ids_name_outputs = aux_layer_ids(raw)
    if ids is None:
        try:
            _check_fusion(layout, shapes, len(default_taps(num_layers)), target_hidden_size)
        except CheckpointError as error:
            raise CheckpointError(
                f"config.json has no eagle_aux_hidden_state_layer_ids, and by default {error}"
            ) from error
    found = candidates(
        num_layers,
        ids,
        ids_name_outputs,
        norm_output=_norm_output(raw, layout),
        norm_before_residual=_norm_before_residual(raw, layout),
        rope_theta=_rope_theta(raw, layout, _body(raw, layout, shapes)),
    )
    if not found:
        named = "the default layers of a head without eagle_aux_hidden_state_layer_ids"
        if ids is not None:
            named = f"eagle_aux_hidden_state_layer_ids={ids}"
        raise CheckpointError(f"{named}: not the ascending ids of layers in 0..{num_layers - 1}")
    return found


def aux_layer_ids(raw: Mapping[str, Any]) -> tuple[list[int] | None, bool]:
    """The ids of the tapped layers (None if the config has none), and whether the ids name the layers' outputs.

    Tools that nest the ids in `eagle_config` name the layers whose outputs are tapped; tools that write the ids at the
    top level name the layers whose inputs are tapped.

    Raises:
        CheckpointError: the ids are not whole numbers.
    """
    nested = object_field(raw, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") if nested is None else nested
    if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        raise CheckpointError(f"config.json: eagle_aux_hidden_state_layer_ids={ids!r} is not a list of integers")
    return ids, nested is not None


def has_axes(raw: Mapping[str, Any]) -> bool:
    """Whether a head uses RoPE positions on three axes, for images and video."""
    rope = _rope(object_field(raw, "transformer_layer_config") or raw)
    return any(field in rope for field in _MROPE_FIELDS)


def _rope(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return object_field(body, "rope_parameters") or object_field(body, "rope_scaling")


def _norm_output(raw: Mapping[str, Any], layout: Layout) -> tuple[bool, ...]:
    given = bool(raw.get("norm_output"))
    return (True, False) if given and layout.norm_output_changed else (given,)


def _norm_before_residual(raw: Mapping[str, Any], layout: Layout) -> tuple[bool, ...]:
    given = raw.get("norm_before_residual")
    return (False, True) if given is None and layout.may_norm_before_residual else (bool(given),)


def _rope_theta(raw: Mapping[str, Any], layout: Layout, body: Mapping[str, Any]) -> tuple[float | None, ...]:
    """RoPE bases to try for plain RoPE, most likely first; None means the base in the config."""
    rope = rope_parameters(body)
    plain = rope["rope_type"] == "default" and not has_axes(raw)
    # When trainers adopted EAGLE-3.1, they already used the config's RoPE base, so an EAGLE-3.1 head uses that base.
    is_new = "fc_norm" in raw or "norm_output" in raw
    if layout.rope_theta is Theta.READ or not plain or rope["rope_theta"] == DEFAULT_ROPE_THETA or is_new:
        return (None,)
    return (DEFAULT_ROPE_THETA, None) if layout.rope_theta is Theta.IGNORED else (None, DEFAULT_ROPE_THETA)


def _check_fusion(layout: Layout, shapes: Shapes, num_taps: int, target_hidden_size: int) -> None:
    """Checks that the input width of `fc` is that of all taps of the target or, for EAGLE-1, of a token embedding and
    one tap.
    """
    rows = shapes.get("fc.weight", ())
    expected = num_taps * target_hidden_size * (2 if layout.family is Family.EAGLE1 else 1)
    if len(rows) == 2 and rows[1] != expected:
        what = "a token and a hidden state" if layout.family is Family.EAGLE1 else f"{num_taps} taps"
        raise CheckpointError(
            f"fc.weight reads {rows[1]} values: {what} of a target with hidden_size={target_hidden_size} are {expected}"
        )


def _body(raw: Mapping[str, Any], layout: Layout, shapes: Shapes) -> Mapping[str, Any]:
    """The config fields of the decoder layer."""
    if not layout.nested_config:
        return raw
    nested = dict(object_field(raw, "transformer_layer_config"))
    default = "qwen3" if f"{layout.layer}self_attn.q_norm.weight" in shapes else "llama"
    kind = nested.setdefault("model_type", default)
    if str(kind) not in _BODIES:
        raise UnsupportedCheckpointError(
            f"transformer_layer_config.model_type={kind!r} is not supported: {' and '.join(_BODIES)} are"
        )
    # The tool that writes nested configs omits fields that equal the default of transformers' config class.
    with fields_refused():
        return _BODIES[kind](**nested).to_dict()


def _check_flags(fields: Mapping[str, Any]) -> None:
    for name in _FLAGS:
        if fields.get(name) is not None and not isinstance(fields[name], bool):
            raise CheckpointError(f"config.json: {name}={fields[name]!r} is neither true nor false")


def _check_body(body: Mapping[str, Any]) -> None:
    rope = object_field(body, "rope_parameters")
    sliding = [kind for kind in (body.get("layer_types") or [])[:1] if kind != "full_attention"]
    for field, value, supported in (
        ("hidden_act", body.get("hidden_act", "silu"), "silu"),
        ("mlp_bias", bool(body.get("mlp_bias")), False),
        ("layer_types", sliding, []),
        ("rope_parameters", "by layer type" if "full_attention" in rope else "one", "one"),
    ):
        if value != supported:
            raise UnsupportedCheckpointError(f"{field}={value!r} is not supported: {supported!r} is")


def _decoder_fields(
    raw: Mapping[str, Any], body: Mapping[str, Any], layout: Layout, shapes: Shapes, target_hidden_size: int
) -> dict[str, Any]:
    heads, hidden = size_field(body, "num_attention_heads"), size_field(body, "hidden_size")
    head_dim = hidden // heads if body.get("head_dim") is None else size_field(body, "head_dim")
    attention = f"{layout.layer}self_attn."
    states_bias = bool(body.get("attention_bias"))
    return {
        "hidden_size": hidden,
        "intermediate_size": size_field(body, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": body.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "target_hidden_size": target_hidden_size,
        "vocab_size": size_field(body, "vocab_size"),
        "draft_vocab_size": raw.get("draft_vocab_size") or size_field(body, "vocab_size"),
        "rms_norm_eps": body.get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope_parameters(body),
        "rotary_dim": rotary_dim(body, head_dim),
        "rope_interleaved": body.get("is_neox_style") is False,
        # EAGLE-1 heads for Vicuna-33B have the field `max_sequence_length` instead of `max_position_embeddings`.
        "max_position_embeddings": body.get("max_position_embeddings") or body.get("max_sequence_length") or 2048,
        "attention_bias": states_bias or bool(body.get("qkv_bias")) or f"{attention}q_proj.bias" in shapes,
        "output_bias": (states_bias and layout.bias_on_output) or f"{attention}o_proj.bias" in shapes,
        "qk_norm": (layout.nested_config and body["model_type"] == "qwen3") or f"{attention}q_norm.weight" in shapes,
        **_of_grids(body, raw),
        "fc_bias": (layout.family is Family.EAGLE1 and bool(raw.get("bias"))) or "fc.bias" in shapes,
    }


def rotary_dim(body: Mapping[str, Any], head_dim: int) -> int | None:
    """Number of elements of an attention head that RoPE rotates; None means all."""
    factor = body.get("partial_rotary_factor") or _rope(body).get("partial_rotary_factor")
    turned = body.get("rotary_dim") or (None if factor is None else int(head_dim * factor))
    return None if turned == head_dim else turned


def _of_grids(body: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the canonical config that concern media spans of a prompt. Only Wingbeat writes the field
    `embeds_media`.
    """
    rope, embeds = _rope(body), raw.get("embeds_media", True)
    if type(embeds) is not bool:
        raise CheckpointError(f"config.json: embeds_media={embeds!r} is neither true nor false")
    sections = rope.get("mrope_section") or []
    if not isinstance(sections, list) or not all(type(count) is int for count in sections):
        raise CheckpointError(f"config.json: mrope_section={sections!r} is not a list of integers")
    interleaved = bool(rope.get("mrope_interleaved"))
    return {"mrope_section": tuple(sections), "mrope_interleaved": interleaved, "embeds_media": embeds}


def size_field(body: Mapping[str, Any], field: str) -> int:
    """A field that must be a positive whole number.

    Raises:
        CheckpointError: the field is missing or has another value.
    """
    value = body.get(field)
    if value is None:
        raise CheckpointError(f"config.json has no field {field!r}")
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {field}={value!r} is not a positive integer")
    return value


def rope_parameters(body: Mapping[str, Any], default_theta: float = DEFAULT_ROPE_THETA) -> dict[str, Any]:
    """RoPE fields in the form of transformers 5; configs in the form of version 4 are converted.

    The fields that assign frequencies to axes and the field of the rotated fraction are left out.
    """
    rope = dict(_rope(body))
    kind = rope.pop("type", None)
    kind = rope.get("rope_type") or kind or "default"
    rope = {name: value for name, value in rope.items() if name not in _NOT_OF_ROPE}
    rope["rope_type"] = "default" if kind == "mrope" else kind
    rope.setdefault("rope_theta", body.get("rope_theta") or default_theta)
    return rope
