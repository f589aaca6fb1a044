"""Result of trying a grammar out."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Written by the process that tries grammars out, read by the engine's."""

    problem: str
    """What is wrong with the grammar, beginning with its field; empty where nothing was found."""
    lark: str
    """What `lark_of_spec` makes of it; empty where something is wrong."""
