"""Which verifier a head was made for, in words: what its files say of one, beside the one that it is given."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from wingbeat.runtime.heads.head_config import Shapes, aux_layer_ids
from wingbeat.runtime.heads.layouts import Family

_NUM_TAPS = 3
"""Of EAGLE-3 heads that do not say where they tap."""


class Sizes(NamedTuple):
    """Of a verifier; None where a head's files do not tell."""

    hidden_size: int | None
    vocab_size: int | None
    num_layers: int | None
    """Of the one that a head was made for, the least that its taps need."""


def another_verifier(raw: Mapping[str, Any], shapes: Shapes, family: Family, given: Sizes) -> str | None:
    """A clause that says whose a head is, where its files tell of another verifier than the given one; else None."""
    own, found = sizes_of_head(raw, shapes, family), []
    for size, mine, unit, least in (
        (own.hidden_size, given.hidden_size, "hidden size {}", False),
        (own.vocab_size, given.vocab_size, "{} words", False),
        (own.num_layers, given.num_layers, "{} layers", True),
    ):
        if size is not None and mine is not None and (size > mine if least else size != mine):
            found.append(((f"at least {unit}" if least else unit).format(size), unit.format(mine)))
    if not found:
        return None
    name = name_of_verifier(raw)
    theirs, ours = (" and ".join(part) for part in zip(*found, strict=True))
    whose = f"{name}, of {theirs}" if name else f"one of {theirs}"
    return f"it belongs to another verifier, {whose}; this one has {ours}"


def sizes_of_head(raw: Mapping[str, Any], shapes: Shapes, family: Family) -> Sizes:
    """What a head's config and shapes tell of its verifier."""
    ids, _ = aux_layer_ids(raw)
    taps = [one for one in ids if isinstance(one, int)] if isinstance(ids, list) else []
    vocab = (_object(raw, "transformer_layer_config") or raw).get("vocab_size")
    if "t2d" in shapes:
        vocab = shapes["t2d"][0]
    hidden = raw.get("target_hidden_size")
    parts = 2 if family is Family.EAGLE1 else len(taps) or _NUM_TAPS
    fusion = shapes.get("fc.weight", ())
    if hidden is None and len(fusion) == 2 and fusion[1] % parts == 0:
        hidden = fusion[1] // parts
    return Sizes(_number(hidden), _number(vocab), max(taps) + 1 if taps else None)


def name_of_verifier(raw: Mapping[str, Any]) -> str | None:
    """As the tools that train heads write it, where they do."""
    nested = _object(_object(raw, "speculators_config"), "verifier")
    for name in (nested.get("name_or_path"), raw.get("target_model_name_or_path"), raw.get("base_model_name_or_path")):
        if isinstance(name, str) and name:
            return name
    return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that should be an object; empty where it is none, which whoever reads it for its own sake refuses."""
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}
