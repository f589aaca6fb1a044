"""The demo pair, started once, and what tests need to look at its processes."""

import os
import time
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
def until() -> Callable[..., None]:
    """Waits for a condition: `until(condition, timeout_s)`."""

    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.1)

    return wait


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
