"""Builds the canonical config of a one-pass head from a checkpoint's config and shapes.

Config and shapes must agree; if a field cannot be read, the error names the field.
"""

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import is_valid, stated
from wingbeat.runtime.heads.files import CheckpointError, fields_refused, object_field
from wingbeat.runtime.heads.head_config import Shapes, rope_parameters, rotary_dim, size_field
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError
from wingbeat.runtime.one_pass.config import (
    DEFAULT_ROPE_THETA,
    LatticeConfig,
    LayerMask,
    MarkovConfig,
    MarkovKind,
    OnePassConfig,
    Slots,
)
from wingbeat.runtime.one_pass.families import OnePassFamily

_SLIDING = "sliding_attention"
_SUBTREES = ("dflash_config", "dspark_config", "eagle_config")


def read_one_pass_config(
    raw: Mapping[str, Any],
    family: OnePassFamily,
    shapes: Shapes,
    target_hidden_size: int,
    target_num_layers: int,
    has_mask_embedding: bool = False,
) -> OnePassConfig:
    """The canonical config of a head.

    Args:
        raw: fields of config.json.
        family: family of the head.
        shapes: shapes of the head's tensors by canonical name.
        target_hidden_size, target_num_layers: sizes of the verifier.
        has_mask_embedding: whether the folder contains a learned mask vector.

    Raises:
        UnsupportedCheckpointError: an architecture, a field or a value is not supported.
        CheckpointError: a field is missing, or does not fit the target; the message names it.
    """
    body = _body(raw)
    check_supported(raw, body, family, shapes)
    _check_target(raw, target_hidden_size, target_num_layers)
    num_layers, hidden = size_field(body, "num_hidden_layers"), size_field(body, "hidden_size")
    vocab_size = size_field(body, "vocab_size")
    with fields_refused():
        return OnePassConfig(
            family=family,
            slots=_slots(raw, family),
            block_size=_whole(_first(raw, "block_size"), "block_size"),
            masks=_masks(raw, body, family, num_layers),
            hidden_size=hidden,
            intermediate_size=size_field(body, "intermediate_size"),
            target_hidden_size=target_hidden_size,
            tap_layers=tap_layers(raw, shapes, num_layers, target_hidden_size, target_num_layers),
            vocab_size=vocab_size,
            draft_vocab_size=raw.get("draft_vocab_size") or vocab_size,
            mask_token_id=None if has_mask_embedding else mask_token_id(raw),
            rms_norm_eps=body.get("rms_norm_eps") or 1e-6,
            max_position_embeddings=body.get("max_position_embeddings") or 32768,
            embedding_scale=float(_first(raw, "input_embedding_scale") or 1.0),
            logit_scale=float(_first(raw, "output_multiplier") or _first(raw, "logit_scale") or 1.0),
            logit_softcap=_first(raw, "final_logit_softcapping"),
            markov=_markov(raw, shapes) if family is OnePassFamily.DSPARK else None,
            lattice=_lattice(raw) if family is OnePassFamily.DFLASH2 else None,
            **_attention(raw, body, shapes, hidden),
        )


def _attention(raw: Mapping[str, Any], body: Mapping[str, Any], shapes: Shapes, hidden: int) -> dict[str, Any]:
    """The fields of `OnePassConfig` about attention."""
    heads = size_field(body, "num_attention_heads")
    head_dim = hidden // heads if body.get("head_dim") is None else size_field(body, "head_dim")
    biased, first = bool(body.get("attention_bias")), "layers.0.self_attn."
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": body.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(body, DEFAULT_ROPE_THETA),
        "rotary_dim": rotary_dim(body, head_dim),
        "rope_interleaved": _first(raw, "is_neox_style") is False,
        "attention_bias": biased or f"{first}q_proj.bias" in shapes,
        "output_bias": biased or f"{first}o_proj.bias" in shapes,
        "qk_norm": f"{first}q_norm.weight" in shapes,
        "sinks": bool(_first(raw, "attention_sink_bias")) or f"{first}attention_sink_bias" in shapes,
        "value_scale": float(_first(raw, "attention_value_scale") or 1.0),
    }


def mask_token_id(raw: Mapping[str, Any]) -> int:
    """The token whose embedding is the input of masked slots.

    Raises:
        CheckpointError: no field names the mask token.
    """
    names = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    found = [_first(raw, name) for name in names]
    given = next((value for value in found if value is not None), None)
    if given is None:
        raise CheckpointError(f"config.json states no mask token, in none of the fields {', '.join(names)}")
    return _whole(given, "mask_token_id", least=0)


def tap_layers(
    raw: Mapping[str, Any], shapes: Shapes, num_draft_layers: int, target_hidden_size: int, target_num_layers: int
) -> tuple[int, ...]:
    """The layers of the target whose inputs are tapped, ascending.

    Raises:
        CheckpointError: the layers do not exist in the target, or the input width of `fc.weight` is that of another
            number of taps.
    """
    field, ids, shift = _stated_taps(raw)
    if ids is None:
        field, shift = "the default target_layer_ids", 1
        ids = _default_outputs(num_draft_layers, target_num_layers)
    if not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        raise CheckpointError(f"config.json: {field}={ids!r} is not a list of integers")
    taps = tuple(one + shift for one in ids)
    if taps and taps[-1] == target_num_layers:
        raise UnsupportedCheckpointError(f"{field}={ids}: the last layer's output before its norm cannot be tapped")
    if not is_valid(taps, target_num_layers):
        raise CheckpointError(f"{field}={ids}: not the ascending ids of layers of a target of {target_num_layers}")
    fusion = shapes.get("fc.weight", ())
    if len(fusion) == 2 and fusion[1] != len(taps) * target_hidden_size:
        raise CheckpointError(
            f"fc.weight reads {fusion[1]} values: {len(taps)} taps of a target with "
            f"hidden_size={target_hidden_size} are {len(taps) * target_hidden_size}"
        )
    return taps


def one_pass_conventions(
    raw: Mapping[str, Any], config: OnePassConfig, target_num_layers: int
) -> tuple[HeadConvention, ...]:
    """Conventions that a head's files allow, most likely first.

    Some tools list the layers whose inputs are tapped, and others list the layers whose outputs are tapped; the field's
    name does not show which. DFlash and DSpark heads seldom state which position a slot predicts.

    Args:
        raw: config.json
        config: canonical config under the likeliest convention.
        target_num_layers: number of layers of the verifier.

    Raises:
        CheckpointError: the stated convention is invalid.
    """
    try:
        given = stated(raw)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error
    if given is not None:
        return (given,)
    _, ids, shift = _stated_taps(raw)
    taps = config.tap_layers
    others = [tuple(tap + by for tap in taps) for by in ((-1, 1) if ids is None else (1 - 2 * shift,))]
    slots = [config.slots]
    says = any(_first(raw, name) is not None for name in ("sample_from_anchor", "shift_label"))
    if not says and config.family in (OnePassFamily.DFLASH, OnePassFamily.DSPARK):
        slots = sorted(Slots, key=lambda each: each is not config.slots)
    return tuple(
        HeadConvention(layers, slots=str(each))
        for layers in (taps, *(other for other in others if is_valid(other, target_num_layers)))
        for each in slots
    )


def _stated_taps(raw: Mapping[str, Any]) -> tuple[str, Any, int]:
    """The name of the field that lists the taps, the field's value, and the offset that converts the listed ids to
    layers whose inputs are tapped.
    """
    for field, shift in (
        ("eagle_aux_hidden_state_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 0),
        ("dspark_target_layer_ids", 1),
        ("target_layer_ids", 1),
        ("layer_ids", 0),
    ):
        ids = _first(raw, field)
        if ids is not None:
            return field, ids, shift
    return "", None, 0


def _default_outputs(num_draft_layers: int, target_num_layers: int) -> list[int]:
    """Default taps, as layers whose outputs are tapped. They are spread evenly from the second layer to the third from
    last.
    """
    if num_draft_layers == 1:
        return [target_num_layers // 2]
    step = (target_num_layers - 4) / (num_draft_layers - 1)
    return [round(1 + index * step) for index in range(num_draft_layers)]


def _body(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config fields of the decoder layers."""
    nested = object_field(raw, "transformer_layer_config")
    if not nested:
        return raw
    if nested.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise UnsupportedCheckpointError(
            f"transformer_layer_config.model_type={nested['model_type']!r} is not supported: qwen3 is"
        )
    # The tool that writes such configs omits fields that equal the default of transformers' config class.
    with fields_refused():
        return Qwen3Config(**{**nested, "model_type": "qwen3"}).to_dict()


def _first(raw: Mapping[str, Any], name: str) -> Any:
    """A field from the family's own section of the config or from the top level; None if neither has it."""
    for part in (*(object_field(raw, subtree) for subtree in _SUBTREES), raw):
        if part.get(name) is not None:
            return part[name]
    return None


def _whole(value: Any, name: str, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise CheckpointError(f"config.json: {name}={value!r} is not an integer of {least} or more")
    return value


def _slots(raw: Mapping[str, Any], family: OnePassFamily) -> Slots:
    """Reads which position a slot predicts. If no field states this: SHIFT for files of DSpark's own tool, FILL_IN for
    all others.
    """
    from_anchor = _first(raw, "sample_from_anchor")
    if from_anchor is None:
        from_anchor = _first(raw, "shift_label")
    if family is OnePassFamily.DSPARK:
        by_default = not raw.get("speculators_model_type")
        return Slots.SHIFT if (by_default if from_anchor is None else from_anchor) else Slots.FILL_IN
    for name in ("sample_from_anchor", "shift_label"):
        if _first(raw, name):
            raise UnsupportedCheckpointError(f"{name}=True is not supported in a {family} head")
    return Slots.FILL_IN


def _masks(
    raw: Mapping[str, Any], body: Mapping[str, Any], family: OnePassFamily, num_layers: int
) -> tuple[LayerMask, ...]:
    """Mask of each layer: whether it is causal, and its window."""
    types = body.get("layer_types") or ["full_attention"] * num_layers
    if len(types) != num_layers or not set(types) <= {_SLIDING, "full_attention"}:
        raise CheckpointError(f"config.json: layer_types={types!r} are not {num_layers} of full or sliding attention")
    everywhere = bool(_first(raw, "use_swa")) and _SLIDING not in types
    size = _first(raw, "swa_window_size") or body.get("sliding_window")
    stated = raw.get("is_causal")
    if stated is None:
        stated = _first(raw, "causal")
    if stated is None and family is OnePassFamily.JETSPEC:
        stated = True
    by_type = not raw.get("sliding_window_non_causal")
    masks = []
    for kind in types:
        slides = everywhere or kind == _SLIDING
        if slides and not size:
            raise CheckpointError(
                "config.json: a layer has sliding attention, but neither swa_window_size nor sliding_window is given"
            )
        causal = kind == _SLIDING and by_type if stated is None else bool(stated)
        masks.append(LayerMask(causal, _whole(size, "sliding_window") if slides else None))
    return tuple(masks)


def _markov(raw: Mapping[str, Any], shapes: Shapes) -> MarkovConfig:
    rank = _first(raw, "markov_rank")
    if rank is None:
        rank = shapes.get("markov_head.markov_w1.weight", (0, 0))[1]
    kind = str(_first(raw, "markov_head_type") or MarkovKind.VANILLA).lower()
    if kind not in tuple(MarkovKind):
        raise UnsupportedCheckpointError(f"markov_head_type={kind!r} is not supported: {', '.join(MarkovKind)} are")
    confident = _first(raw, "enable_confidence_head")
    if confident is None:
        confident = "confidence_head.proj.weight" in shapes
    with_token = _first(raw, "confidence_head_with_markov")
    reads_token = bool(rank) and (True if with_token is None else bool(with_token))
    return MarkovConfig(_whole(rank, "markov_rank", least=0), MarkovKind(kind), bool(confident), reads_token)


def _lattice(raw: Mapping[str, Any]) -> LatticeConfig:
    fields = {"num_taps": "conv_kernel_size", "rank": "selector_rank", "top_k": "selector_top_k"}
    given = {mine: _first(raw, theirs) for mine, theirs in fields.items()}
    sizes = {mine: _whole(value, fields[mine]) for mine, value in given.items() if value is not None}
    return LatticeConfig(**sizes, group_size=_whole(_first(raw, "conv_group_size"), "conv_group_size"))


def _check_target(raw: Mapping[str, Any], target_hidden_size: int, target_num_layers: int) -> None:
    for name, given in (("target_hidden_size", target_hidden_size), ("num_target_layers", target_num_layers)):
        stated = _first(raw, name)
        if stated is not None and stated != given:
            raise CheckpointError(f"{name}={stated} differs from the target's {given}")


def check_supported(raw: Mapping[str, Any], body: Mapping[str, Any], family: OnePassFamily, shapes: Shapes) -> None:
    """Raise an error for architectures other than Qwen3's; the error names the unsupported feature."""
    architecture = str(raw.get("architectures") or "").lower()
    rope = object_field(body, "rope_parameters")
    for what, seen in (
        ("a Gemma body", "gemma" in architecture or str(body.get("model_type")).startswith("gemma")),
        ("MLA attention", "kv_lora_rank" in body or any(".kv_a_proj" in name for name in shapes)),
        ("a mixture of experts", any(".experts." in name for name in shapes)),
        ("hidden_act", body.get("hidden_act", "silu") != "silu"),
        ("mlp_bias", bool(body.get("mlp_bias"))),
        ("rope_parameters by layer type", "full_attention" in rope),
        ("use_aux_hidden_state=False", _first(raw, "use_aux_hidden_state") is False),
        ("hybrid_context_fusion", bool(_first(raw, "hybrid_context_fusion"))),
    ):
        if seen:
            raise UnsupportedCheckpointError(f"a {family} head with {what} is not supported")
