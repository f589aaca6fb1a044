"""The drafter `ngram`, which drafts for any model, and so by default."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind, DrafterSetting

_BUILD = "wingbeat.runtime.ngram.ngram_drafter:build_ngram"
_CHECK = "wingbeat.runtime.ngram.lookup_window:lookup_window"
_SETTINGS = (
    DrafterSetting(
        "prompt_lookup_max",
        int,
        1,
        64,
        "With drafter ngram: most tokens at the end of a text that are looked up in it; by default 4, or "
        "prompt_lookup_min.",
    ),
    DrafterSetting(
        "prompt_lookup_min",
        int,
        1,
        64,
        "With drafter ngram: fewest of these tokens that must be found; by default 2, or prompt_lookup_max.",
    ),
)
drafter_kinds = (
    DrafterKind("ngram", _BUILD, copies_text=True, is_fallback=True, settings=_SETTINGS, check_settings=_CHECK),
)
