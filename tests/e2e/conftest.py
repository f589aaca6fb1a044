"""The demo pair, started once, and what tests need to look at its processes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def eagle_app(start_app: Callable[..., Any]) -> Iterator[Any]:
    """The demo pair with its EAGLE head; a stuck drafter is noticed sooner than `make serve` does.

    Trees are fixed: on a machine busy with tests the measured costs may well say that speculation does not pay.
    """
    with start_app("e2e-eagle", drafter_timeout_s=2.0, adaptive=False) as app:
        yield app


@pytest.fixture(scope="session")
def process_exists() -> Callable[[int], bool]:
    """Whether a process is there and not a zombie."""

    def exists(pid: int) -> bool:
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (ProcessLookupError, FileNotFoundError):
            return False

    return exists
