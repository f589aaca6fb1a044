"""Answers of engines to what operators of rollouts ask."""

from typing import Any, Literal, NamedTuple, get_args

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = get_args(PauseMode)


class Told(NamedTuple):
    """An engine's answer."""

    value: Any = None
    refused: str | None = None
    """Why what was sent does not fit; nothing of it was done."""
    conflict: str | None = None
    """Why it cannot be done now."""
    serves: bool = True
    """Whether all weights are those of one update."""
    is_open: bool = False
    """Whether an update is under way."""


class Finished(NamedTuple):
    """An update that is served."""

    num_tensors: int
    of_head: bool = False
    """Whether the draft head has changed, and not what is written."""
