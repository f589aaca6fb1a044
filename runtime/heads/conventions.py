"""Lists the conventions under which a checkpoint can be read, if its tensors and config allow several.

Different training tools mean different things by the same config values, and a head that is read under the wrong
convention drafts badly without an error. The most likely convention comes first; only a measurement of acceptance
determines which convention is right.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from wingbeat.runtime.heads.contract import HeadConvention

STATED = "wingbeat_convention"
"""Config field that Wingbeat writes: the convention itself, so that the other fields need no interpretation."""


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3's own code taps: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """The layers of `default_taps`. For models with too few layers for `default_taps`, the second, a middle and the
    last layer are returned instead.
    """
    standard = default_taps(num_layers)
    if is_valid(standard, num_layers):
        return standard
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))


def candidates(
    num_layers: int,
    ids: Iterable[int] | None,
    ids_name_outputs: bool,
    norm_output: tuple[bool, ...],
    norm_before_residual: tuple[bool, ...],
    rope_theta: tuple[float | None, ...] = (None,),
) -> tuple[HeadConvention, ...]:
    """Possible conventions of a head with an EAGLE-3 config, most likely first.

    Args:
        num_layers: number of layers of the target.
        ids: layer ids as the config lists them; None if absent.
        ids_name_outputs: True if an id in this format names the layer whose output is tapped; False if an id names the
            layer whose input is tapped.
        norm_output, norm_before_residual, rope_theta: values to try, most likely first.
    """
    taps = _tap_candidates(num_layers, None if ids is None else tuple(ids), ids_name_outputs)
    return tuple(
        HeadConvention(tap_layers=layers, norm_output=norms, norm_before_residual=before, rope_theta=theta)
        for layers, norms, before, theta in product(taps, norm_output, norm_before_residual, rope_theta)
    )


def stated(raw: Mapping[str, Any]) -> HeadConvention | None:
    """The convention in a file written by Wingbeat; None if the field is absent.

    Raises:
        ValueError: the field is not a convention.
    """
    fields = raw.get(STATED)
    if fields is None:
        return None
    try:
        convention = HeadConvention(**fields)
        return convention._replace(tap_layers=tuple(int(layer) for layer in convention.tap_layers))
    except TypeError as error:
        raise ValueError(
            f"{STATED}={fields!r} is not a convention: {', '.join(HeadConvention._fields)} are its fields"
        ) from error


def state(convention: HeadConvention) -> dict[str, Any]:
    """Fields for config.json that contain a convention, as `stated` reads them."""
    fields = convention._asdict() | {"tap_layers": list(convention.tap_layers)}
    return {STATED: {name: value for name, value in fields.items() if name != "slots" or value is not None}}


def _tap_candidates(num_layers: int, ids: tuple[int, ...] | None, ids_name_outputs: bool) -> list[tuple[int, ...]]:
    usual = default_taps(num_layers)
    if ids is None:
        tried = [usual, _shifted(usual, -1), _shifted(usual, 1)]
    else:
        documented, other = (_shifted(ids, 1), ids) if ids_name_outputs else (ids, _shifted(ids, 1))
        # If the documented meaning of the ids gives the usual layers, the other meaning is not tried.
        tried = [documented] if documented == usual else [documented, other]
    return [taps for taps in tried if is_valid(taps, num_layers)]


def is_valid(taps: tuple[int, ...], num_layers: int) -> bool:
    """Whether taps are ascending indices of existing layers."""
    return bool(taps) and list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < num_layers


def _shifted(taps: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(layer + by for layer in taps)
