"""The drafter `suffix`."""


def text_drafters() -> dict[str, str]:
    """The drafter by its name."""
    return {"suffix": "wingbeat.runtime.suffix.suffix_drafter:build_suffix"}


def remembering_drafters() -> tuple[str, ...]:
    """Its automaton holds the texts of all requests."""
    return ("suffix",)
