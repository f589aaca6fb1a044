"""Answers of engines to rollout operations."""

from typing import Any, Literal, NamedTuple, get_args

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = get_args(PauseMode)


class Told(NamedTuple):
    """An engine's answer."""

    value: Any = None
    refused: str | None = None
    """Why the sent data do not fit; nothing was done."""
    conflict: str | None = None
    """Why the operation is not possible now."""
    serves: bool = True
    """Whether all weights are those of one finished update."""
    is_open: bool = False
    """Whether an update is open."""


class Finished(NamedTuple):
    """Result of a finished update."""

    num_tensors: int
    of_head: bool = False
    """Whether the update was of the draft head."""
    checksums: dict[str, str] | None = None
    """SHA-256 of each weight by name, if the trainer asked for checksums."""
