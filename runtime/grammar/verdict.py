"""What the process that tries grammars out says of one."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Of one grammar."""

    problem: str
    """What is wrong with it, beginning with its field; empty where nothing was found."""
    lark: str
    """What `lark_of_spec` makes of it; empty where something is wrong."""
