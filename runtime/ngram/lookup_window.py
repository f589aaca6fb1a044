"""Lengths of what prompt lookup looks for; loads no torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class LookupWindow(NamedTuple):
    """Tokens at the end of a text that must have occurred before: the most of them that did, within these bounds."""

    shortest: int = 2
    longest: int = 4


def lookup_window(settings: Mapping[str, Any]) -> LookupWindow:
    """By `prompt_lookup_min` and `prompt_lookup_max`; where one of them is given, the other one is the same.

    Raises:
        ValueError: the least is above the most.
    """
    least, most = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    if least is None and most is None:
        return LookupWindow()
    window = LookupWindow(least or most, most or least)
    if window.shortest > window.longest:
        raise ValueError(f"prompt_lookup_min is {least} and prompt_lookup_max is {most}: it must not be above that")
    return window
