"""What a machine needs to serve, asked part by part before anybody depends on it: `wingbeat doctor`.

Each part has a limit of time and one line, and none stops those behind it. Knows nothing of terminals.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.checks.bounded_step import bounded_step


class Verdict(StrEnum):
    """Of one part."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """One line of the report."""

    part: str
    verdict: Verdict
    detail: str
    seconds: float = 0.0


class Part(NamedTuple):
    """What is asked."""

    name: str
    most_s: float
    ask: Callable[[], tuple[Verdict, str]]


def examine(parts: Iterable[Part]) -> Iterator[Finding]:
    """Ask part after part; what raises or hangs has failed."""
    for part in parts:
        started = time.monotonic()
        try:
            verdict, detail = bounded_step(part.name, part.most_s, "it was given up", part.ask)
        except Exception as error:  # whatever a broken installation raises is what the report is for
            text = (str(error).strip().splitlines() or [""])[0]
            verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {text}"
        yield Finding(part.name, verdict, detail, time.monotonic() - started)
