"""Registers draft models, the kind of every folder that no other kind claims."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "draft_model",
        "wingbeat.runtime.draft_model.model_drafter:build_draft_model",
        folder="a draft model",
    ),
)
