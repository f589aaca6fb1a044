"""Detects from a draft head's files that the head was made for another verifier, and writes the clause of the error
message that describes that verifier.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from wingbeat.runtime.heads.head_config import Shapes, aux_layer_ids
from wingbeat.runtime.heads.layouts import Family

_NUM_TAPS = 3
"""Number of taps of EAGLE-3 heads whose config does not list them."""


class Sizes(NamedTuple):
    """Sizes of a verifier; a size that a head's files do not give is None."""

    hidden_size: int | None
    vocab_size: int | None
    num_layers: int | None
    """Number of layers. If the sizes are derived from a head's files, this is the minimum number, one more than the
    head's highest tap.
    """


class Target(Protocol):
    """The verifier's fields that are compared with `Sizes`."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


def another_verifier(raw: Mapping[str, Any], shapes: Shapes, family: Family, target: Target) -> str | None:
    """A clause that names the verifier for which a head was made, if that verifier's sizes differ from the sizes of
    `target`.

    Returns None if no size differs.
    """
    own, found = sizes_of_head(raw, shapes, family), []
    for size, mine, unit, least in (
        (own.hidden_size, target.hidden_size, "hidden size {}", False),
        (own.vocab_size, target.vocab_size, "{} words", False),
        (own.num_layers, target.num_layers, "{} layers", True),
    ):
        if size is not None and (size > mine if least else size != mine):
            found.append(((f"at least {unit}" if least else unit).format(size), unit.format(mine)))
    if not found:
        return None
    name = name_of_verifier(raw)
    theirs, ours = (" and ".join(part) for part in zip(*found, strict=True))
    whose = f"{name}, of {theirs}" if name else f"one of {theirs}"
    return f"it belongs to another verifier, {whose}; this one has {ours}"


def sizes_of_head(raw: Mapping[str, Any], shapes: Shapes, family: Family) -> Sizes:
    """Sizes of the verifier for which a head was made, derived from the head's config and tensor shapes."""
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
    """The verifier's name from the fields that training tools write to a head's config; None if there is no such
    field.
    """
    nested = _object(_object(raw, "speculators_config"), "verifier")
    for name in (nested.get("name_or_path"), raw.get("target_model_name_or_path"), raw.get("base_model_name_or_path")):
        if isinstance(name, str) and name:
            return name
    return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field's value if it is an object, else an empty mapping. The error for a value of another type is raised by the
    code that reads the head.
    """
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}
