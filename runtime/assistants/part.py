"""Registers Gemma 4's assistants."""

from collections.abc import Iterable, Mapping
from typing import Any

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "assistant",
        "wingbeat.runtime.assistants.shared_kv_drafter:build_shared_kv",
        folder="",
        claims="wingbeat.runtime.assistants.part:is_assistant",
        check="wingbeat.runtime.assistants.shared_kv_drafter:check_shared_kv",
    ),
)
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of `model_type` in the config of an assistant."""


def is_assistant(raw: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether the fields of a folder's config.json are those of an assistant."""
    return raw.get("model_type") in MODEL_TYPES
