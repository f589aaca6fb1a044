"""What tests need to look at the processes of an application, and at its page."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.chromium import Chromium, find_chromium


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


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A browser with one tab."""
    browser = Chromium(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
