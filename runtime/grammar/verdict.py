"""Result of a grammar's trial."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Result of a grammar's trial: the worker process writes it, and the engine's process reads it."""

    problem: str
    """Description of the problem, beginning with the request's field; empty if there is none."""
    lark: str
    """Result of `lark_of_spec`; empty if there is a problem."""
