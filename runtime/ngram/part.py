"""The drafter `ngram`."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """Drafts for any model, and so by default."""
    build = "wingbeat.runtime.ngram.ngram_drafter:build_ngram"
    return (DrafterKind("ngram", build, copies_text=True, is_fallback=True),)
