"""Names that requests give to LoRA adapters."""

MOST_NAME_CHARS = 256


def name_problem(name: str) -> str | None:
    """Why an adapter cannot have a name; None where it can."""
    if not 0 < len(name) <= MOST_NAME_CHARS or not name.isprintable() or name != name.strip():
        return f"must have 1 to {MOST_NAME_CHARS} printable characters, no space at its ends"
    return None
