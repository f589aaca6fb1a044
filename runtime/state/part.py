"""Layers that keep recurrent states; imports what runs them where a model has some."""

from typing import TYPE_CHECKING

from wingbeat.runtime.state.settings import check_limits, engine_settings, refusals

if TYPE_CHECKING:
    from wingbeat.runtime.state.mixer_search import RememberedStates

__all__ = ["check_limits", "engine_settings", "refusals"]


def remembered(layers: list[object]) -> "RememberedStates | None":
    """States of layers; None where no layer has one."""
    from wingbeat.runtime.state.mixer_search import remembered_states

    return remembered_states(layers)
