"""Runs checks, one after the other, of whether a machine can serve: the logic of `wingbeat doctor`.

Each check has a time limit and yields one line. If a check fails, the later checks are run all the same. This module
does not depend on a terminal.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.engine_checks.bounded_step import bounded_step


class Verdict(StrEnum):
    """Result of one check."""

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
    """A check: its name, its time limit in seconds, and the function that performs it."""

    name: str
    most_s: float
    ask: Callable[[], tuple[Verdict, str]]


def examine(parts: Iterable[Part]) -> Iterator[Finding]:
    """Run all checks in order and yield their findings; a check that raises an error or exceeds its time limit counts
    as failed.
    """
    for part in parts:
        started = time.monotonic()
        try:
            verdict, detail = bounded_step(part.name, part.most_s, "it was given up", part.ask)
        except Exception as error:  # a broken installation may raise any exception; each is reported as a finding
            text = (str(error).strip().splitlines() or [""])[0]
            verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {text}"
        yield Finding(part.name, verdict, detail, time.monotonic() - started)
