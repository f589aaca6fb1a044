"""Answers of engines to rollout operations."""

from typing import Any, Literal, NamedTuple, get_args

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = get_args(PauseMode)


class OperationResult(NamedTuple):
    """An engine's answer to an operation."""

    value: Any = None
    refused: str | None = None
    """Why the data that the caller sent cannot be used; nothing was changed then. None if the data can be used."""
    conflict: str | None = None
    """Why the operation is not possible now; None if it is possible."""
    serves: bool = True
    """Whether the engine serves requests. False if an update has left some of its weights old or without values."""
    is_open: bool = False
    """Whether an update is open."""


class Finished(NamedTuple):
    """Result of a finished update."""

    num_tensors: int
    of_head: bool = False
    """Whether the update was of the draft head."""
    checksums: dict[str, str] | None = None
    """SHA-256 of each weight by name, if the trainer asked for checksums."""
