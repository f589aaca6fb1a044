"""Draft models."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """A whole model's folder has no sign of its own."""
    module = "wingbeat.runtime.draft_model.model_drafter"
    build, check = f"{module}:build_draft_model", f"{module}:check_draft_model"
    return (DrafterKind("draft_model", build, check, folder="a draft model"),)
