"""Allowed ranges of the numbers in a checkpoint's config files that are used as index, size, divisor or exponent.

transformers uses most of these numbers unchecked. The load-time test compares with transformers, which uses the same
numbers, so the test would not find a wrong number. This module imports no torch.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes, by torch's names, that a config may declare for its weights."""
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
MOST_MODULES = 2**16
"""Largest number of layers or experts that a config may declare; limited because code creates a module for each or
loops over them.
"""


class _Rule(NamedTuple):
    """Range of allowed numbers.

    Fields that are null or absent are not checked, because the config class's default then applies.
    """

    least: float
    most: float
    words: str
    whole: bool = False
    above_least: bool = False
    listed: bool = False
    """Whether a list of numbers, by layer or by frequency, is allowed."""

    def allows(self, value: object) -> bool:
        if isinstance(value, list) and (self.whole or self.listed):
            return all(map(self._allows_one, value))
        return self._allows_one(value)

    def _allows_one(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.least <= value <= self.most and not (self.above_least and value == self.least)


_SIZE = _Rule(1, _INT32_MAX, "a positive whole number", whole=True)
_MODULES = _Rule(1, MOST_MODULES, f"a positive whole number up to {MOST_MODULES}", whole=True)
_COUNT = _Rule(0, MOST_MODULES, f"a whole number from 0 to {MOST_MODULES}", whole=True)
_TOKEN = _Rule(-_INT64_MAX, _INT64_MAX, "a token id, or a list of them", whole=True)
_POSITIVE = _Rule(0, 1e12, "a number above 0", above_least=True)
_EPSILON = _Rule(0, 1, "a number above 0, at most 1", above_least=True)
_SHARE = _Rule(0, 1, "a number above 0, at most 1", above_least=True)
_NOT_NEGATIVE = _Rule(0, 1e12, "a number of at least 0", listed=True)
_FINITE = _Rule(-1e12, 1e12, "a finite number", listed=True)

_RULES: tuple[tuple[re.Pattern[str], _Rule], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"num_hidden_layers|n_layers?|num_layers", _MODULES),
        # 0 is allowed, because dense models of a mixture-of-experts family declare 0 experts, and latent attention with
        # separate part sizes declares a head_dim of 0.
        (r"(num|n)_(kv_shared|nextn_predict|dense)_layers|first_k_dense_replace|(\w+_)?head_dim|kv_lora_rank", _COUNT),
        (r"(moe_)?(num|n)_((local|shared|routed)_)?experts(_per_tok(en)?)?|moe_intermediate_size", _COUNT),
        (r"(draft_|target_)?(vocab|hidden|intermediate)_size|n_embd|d_model|ffn_dim", _SIZE),
        (r"(num|n)_(attention_|key_value_|global_key_value_|kv_)?heads?", _SIZE),
        (r"(original_)?max_position_embeddings|max_sequence_length|n_positions|n_ctx", _SIZE),
        (r"sliding_window|attention_chunk_size", _SIZE),
        (r"\w*_token_(ids?|index)", _TOKEN),
        (r"\w*(norm|rms)\w*_(eps|epsilon)(_\w+)?", _EPSILON),
        (r"layer_rope_theta", _NOT_NEGATIVE),
        (r"\w*rope_theta|rotary_emb_base|rope_\w*base_freq|rope_\w+_factor", _POSITIVE),
        (r"(short|long)_factor", _POSITIVE._replace(listed=True)),
        (r"(low_freq|high_freq|attention)_factor|beta_(fast|slow)|query_pre_attn_scalar", _POSITIVE),
        (r"partial_rotary_factor|rotary_pct", _SHARE),
        (r"mscale(_all_dim)?", _NOT_NEGATIVE),
        (r"(attn|final)_logit_soft_?capping|logits?_soft_?cap|output_logit_soft_cap|logits?_scal(e|ing)", _POSITIVE),
        (r"(?!use_)\w+_multiplier|scale_(emb|depth)|\w*routed_scaling_factor", _FINITE),
    )
)
_OF_ROPE = {"factor": _POSITIVE}
"""Rules for field names that apply only inside rope parameters."""
FOREIGN = frozenset({"quantization_config", "compression_config", "task_specific_params", "id2label", "label2id"})
"""Names of objects that are not checked, because their field names are chosen by other libraries or by users."""


def problem(fields: Mapping[str, Any]) -> str | None:
    """Returns a text that names the first impossible field of a config and its allowed values.

    Returns None if all fields are possible.

    Args:
        fields: the fields of config.json; nested objects are checked too.
    """
    return next(_problems(fields, ()), None)


def _problems(fields: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    in_rope = any(name.startswith("rope") for name in path)
    for name, value in fields.items():
        place = (*path, name)
        if name in FOREIGN or value is None:
            continue
        if name in ("dtype", "torch_dtype"):
            if not isinstance(value, str) or value not in DTYPES:
                yield _wrong(place, value, f"one of {', '.join(DTYPES)}")
        elif (rule := _rule(name, in_rope)) is not None:
            # The size of a sliding window that is switched off may have any value.
            off = name == "sliding_window" and fields.get("use_sliding_window") is False
            if not off and not rule.allows(value):
                yield _wrong(place, value, rule.words)
        elif isinstance(value, Mapping):
            yield from _problems(value, place)
        elif _holds_nan(value):
            yield _wrong(place, value, "a number")


def is_whole(name: str) -> bool:
    """Whether a field with this name holds a whole number or a list of whole numbers."""
    rule = _rule(name, False)
    return rule is not None and rule.whole


def _rule(name: str, in_rope: bool) -> _Rule | None:
    if in_rope and name in _OF_ROPE:
        return _OF_ROPE[name]
    return next((rule for pattern, rule in _RULES if pattern.fullmatch(name)), None)


def _holds_nan(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and math.isnan(value)


def _wrong(place: tuple[str, ...], value: object, words: str) -> str:
    shown = json.dumps(value)
    return f"{'.'.join(place)} is {shown if len(shown) <= 80 else f'{shown[:77]}...'}, it must be {words}"
