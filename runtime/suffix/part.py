"""The drafter `suffix`, whose automaton holds the texts of all requests."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

_BUILD = "wingbeat.runtime.suffix.suffix_drafter:build_suffix"
drafter_kinds = (DrafterKind("suffix", _BUILD, copies_text=True, remembers=True),)
