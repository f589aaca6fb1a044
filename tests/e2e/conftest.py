"""Fixtures for the processes and the page of an application, and a cluster that runs already."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.chromium import Chromium, find_chromium
from tests.e2e.operators_cluster import Cluster


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


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """A cluster without applications."""
    folder = Path(tempfile.mkdtemp(prefix="wbc"))
    cluster = Cluster(folder)
    yield cluster
    cluster.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """The cluster, and after a test none of its applications."""
    yield running
    running.shut_down()
