"""Examines, part by part, whether a machine can serve: the logic of `wingbeat doctor`.

Each part has a time limit and yields one line; a failed part does not stop later ones. Independent of terminals.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.checks.bounded_step import bounded_step


class Verdict(StrEnum):
    """Verdict on one part."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """A line of the report."""

    part: str
    verdict: Verdict
    detail: str
    seconds: float = 0.0


class Part(NamedTuple):
    """A check: its name, its limit in seconds, and the function that runs it."""

    name: str
    most_s: float
    ask: Callable[[], tuple[Verdict, str]]


def examine(parts: Iterable[Part]) -> Iterator[Finding]:
    """Run all checks in order; a check that raises or hangs has failed."""
    for part in parts:
        started = time.monotonic()
        try:
            verdict, detail = bounded_step(part.name, part.most_s, "it was given up", part.ask)
        except Exception as error:  # any exception of a broken installation is a finding to report
            text = (str(error).strip().splitlines() or [""])[0]
            verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {text}"
        yield Finding(part.name, verdict, detail, time.monotonic() - started)
