"""Whether an engine has a drafter."""

from enum import StrEnum


class DrafterState(StrEnum):
    """Whether rounds are drafted."""

    NONE = "none"
    ATTACHED = "attached"
    LOST = "lost"
    """Dead or silent: the engine decodes plainly until another drafter is attached."""
