"""The drafter `ngram`, which drafts for any model, and so by default."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

_BUILD = "wingbeat.runtime.ngram.ngram_drafter:build_ngram"
drafter_kinds = (DrafterKind("ngram", _BUILD, copies_text=True, is_fallback=True),)
