"""Registers draft models; a folder that no other kind of drafter claims is opened as a draft model."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "draft_model",
        "wingbeat.runtime.draft_model.model_drafter:build_draft_model",
        folder="a draft model",
    ),
)
