"""Verdict of the document's rules on a body: the errors that may come back, and whether an error must."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNSERVED = ("unsupported_parameter", "unsupported_value")
MALFORMED = ("invalid_type", "invalid_value")
ANY_FAULT = (*UNSERVED, *MALFORMED, "missing_required_parameter")
INT32 = 2**31 - 1
LIMITS = ("max_tokens", "max_completion_tokens")


class Outcome(NamedTuple):
    """An error that may come back."""

    status: int
    code: str
    param: str | None = None
    """The field, or a field that the answer's `param` begins with; None where no field is to blame."""


@dataclass
class Findings:
    """Findings of the rules on a body."""

    outcomes: set[Outcome] = field(default_factory=set)
    must_fail: bool = False

    def wrong(self, param: str, *codes: str, status: int = 400) -> None:
        """An error with one of these codes is demanded, unless another field's comes first."""
        self.open(param, *codes, status=status)
        self.must_fail = True

    def open(self, param: str, *codes: str, status: int = 400) -> None:
        """An error with one of these codes is allowed."""
        self.outcomes |= {Outcome(status, code, param) for code in codes or MALFORMED}


def is_number(value: Any) -> bool:
    """A JSON number that is no boolean."""
    return type(value) in (int, float)


def whole(low: int, high: int) -> Callable[[Findings, str, Any], None]:
    """The rule of an integer field."""

    def judge(found: Findings, name: str, value: Any) -> None:
        if type(value) is float and value == int(value) and low <= value <= high:
            found.open(name)
        elif type(value) is not int or not low <= value <= high:
            found.wrong(name)
            if type(value) is int and value > high and name in LIMITS:
                # Such an answer does not fit the context either.
                found.open(name, "context_length_exceeded")

    return judge


def share(low: float, high: float, *, above: bool = False) -> Callable[[Findings, str, Any], None]:
    """The rule of a number."""

    def judge(found: Findings, name: str, value: Any) -> None:
        if not is_number(value) or not low <= value <= high or (above and value == low):
            found.wrong(name)

    return judge


def flag(found: Findings, name: str, value: Any) -> None:
    """The rule of a boolean."""
    if type(value) is not bool:
        found.wrong(name)
