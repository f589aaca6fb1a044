"""Detects from a draft head's files that the head was made for another verifier, and writes the clause of the error
message that describes that verifier. Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

_NUM_TAPS = 3
"""Number of taps of EAGLE-3 heads whose config does not list them."""
_SECTIONS = ("eagle_config", "dflash_config", "dspark_config")
_TAPS = (
    *("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "dspark_target_layer_ids"),
    *("target_layer_ids", "layer_ids"),
)
"""Config fields that list the tapped layers, in order of precedence."""


class Sizes(NamedTuple):
    """Sizes of a verifier; a size that a head's files do not give is None."""

    hidden_size: int | None
    vocab_size: int | None
    num_layers: int | None
    least_layers: int | None = None
    """Minimum number of layers, one more than the head's highest tap."""


class Target(Protocol):
    """The verifier's fields that are compared with `Sizes`; a field that is None is not compared."""

    @property
    def hidden_size(self) -> int | None: ...

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def num_layers(self) -> int | None: ...


def another_verifier(
    raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Target, is_eagle1: bool = False
) -> str | None:
    """A clause that names the verifier for which a head was made, if that verifier's sizes differ from the sizes of
    `target`.

    Returns None if no size differs.
    """
    own, found = sizes_of_head(raw, shapes, is_eagle1), []
    for size, mine, unit, least in (
        (own.hidden_size, target.hidden_size, "hidden size {}", False),
        (own.vocab_size, target.vocab_size, "{} words", False),
        (own.num_layers, target.num_layers, "{} layers", False),
        (own.least_layers if own.num_layers is None else None, target.num_layers, "{} layers", True),
    ):
        if size is not None and mine is not None and (size > mine if least else size != mine):
            found.append(((f"at least {unit}" if least else unit).format(size), unit.format(mine)))
    if not found:
        return None
    name = name_of_verifier(raw)
    theirs, ours = (" and ".join(part) for part in zip(*found, strict=True))
    whose = f"{name}, of {theirs}" if name else f"one of {theirs}"
    return f"the head belongs to another verifier, {whose}; this one has {ours}"


def sizes_of_head(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], is_eagle1: bool = False) -> Sizes:
    """Sizes of the verifier for which a head was made, derived from the head's config and tensor shapes."""
    given = [ids for name in _TAPS if (ids := _stated(raw, name)) is not None][:1]
    taps = [one for one in given[0] if isinstance(one, int)] if given and isinstance(given[0], list) else []
    vocab = (_object(raw, "transformer_layer_config") or raw).get("vocab_size")
    if "t2d" in shapes:
        vocab = shapes["t2d"][0]
    hidden = _stated(raw, "target_hidden_size")
    parts = 2 if is_eagle1 else len(taps) or _NUM_TAPS
    fusion = shapes.get("fc.weight", ())
    if hidden is None and len(fusion) == 2 and fusion[1] % parts == 0:
        hidden = fusion[1] // parts
    num_layers = _number(_stated(raw, "num_target_layers"))
    return Sizes(_number(hidden), _number(vocab), num_layers, max(taps) + 1 if taps else None)


def name_of_verifier(raw: Mapping[str, Any]) -> str | None:
    """The verifier's name from the fields that training tools write to a head's config; None if there is no such
    field.
    """
    nested = _object(_object(raw, "speculators_config"), "verifier")
    for name in (nested.get("name_or_path"), raw.get("target_model_name_or_path"), raw.get("base_model_name_or_path")):
        if isinstance(name, str) and name:
            return name
    return None


def _stated(raw: Mapping[str, Any], name: str) -> Any:
    """A field of a section of the config, or else of the top level; None if neither has it."""
    parts = (*(_object(raw, section) for section in _SECTIONS), raw)
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field's value if it is an object, else an empty mapping. The error for a value of another type is raised by the
    code that reads the head.
    """
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}
