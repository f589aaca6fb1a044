"""Names of LoRA adapters in requests."""

MOST_NAME_CHARS = 256


def name_problem(name: str) -> str | None:
    """Returns the reason why a string cannot be an adapter's name; None if it can be one."""
    if not 0 < len(name) <= MOST_NAME_CHARS or not name.isprintable() or name != name.strip():
        return f"must have 1 to {MOST_NAME_CHARS} printable characters, no space at its ends"
    return None
