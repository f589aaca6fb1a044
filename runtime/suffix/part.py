"""The drafter `suffix`."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """Its automaton holds the texts of all requests."""
    build = "wingbeat.runtime.suffix.suffix_drafter:build_suffix"
    return (DrafterKind("suffix", build, copies_text=True, remembers=True),)
