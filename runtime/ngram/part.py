"""Registers the drafter `ngram`, the default because it drafts for any model."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind, DrafterSetting

_BUILD = "wingbeat.runtime.ngram.ngram_drafter:build_ngram"
_CHECK = "wingbeat.runtime.ngram.lookup_window:lookup_window"
_SETTINGS = (
    DrafterSetting(
        "prompt_lookup_max",
        int,
        1,
        64,
        "With drafter ngram: maximum length in tokens of the text's suffix that is looked up in the text; by default "
        "4, or prompt_lookup_min.",
    ),
    DrafterSetting(
        "prompt_lookup_min",
        int,
        1,
        64,
        "With drafter ngram: minimum length in tokens of the matching suffix; by default 2, or prompt_lookup_max.",
    ),
)
drafter_kinds = (
    DrafterKind("ngram", _BUILD, copies_text=True, is_fallback=True, settings=_SETTINGS, check_settings=_CHECK),
)
