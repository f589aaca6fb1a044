"""Draft models: a whole model's folder has no sign of its own."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "draft_model",
        "wingbeat.runtime.draft_model.model_drafter:build_draft_model",
        folder="a draft model",
    ),
)
