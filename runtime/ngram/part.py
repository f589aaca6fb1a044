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
        "With drafter ngram: maximum tokens at the end of a text that are looked up in the text; by default 4, or "
        "prompt_lookup_min if that is given.",
    ),
    DrafterSetting(
        "prompt_lookup_min",
        int,
        1,
        64,
        "With drafter ngram: minimum tokens that must be found; by default 2, or prompt_lookup_max if that is given.",
    ),
)
drafter_kinds = (
    DrafterKind("ngram", _BUILD, copies_text=True, is_fallback=True, settings=_SETTINGS, check_settings=_CHECK),
)
