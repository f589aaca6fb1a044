"""Suffix lengths for prompt lookup; does not import torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class LookupWindow(NamedTuple):
    """Minimum and maximum length in tokens of the suffix that must have occurred earlier in the sequence."""

    shortest: int = 2
    longest: int = 4


def lookup_window(settings: Mapping[str, Any]) -> LookupWindow:
    """Builds the window from `prompt_lookup_min` and `prompt_lookup_max`; if only one of the two is given, both get its
    value.

    Raises:
        ValueError: the minimum is above the maximum.
    """
    least, most = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    if least is None and most is None:
        return LookupWindow()
    window = LookupWindow(least or most, most or least)
    if window.shortest > window.longest:
        raise ValueError(
            f"prompt_lookup_min is {least} and prompt_lookup_max is {most}: the minimum is above the maximum"
        )
    return window
