"""Peers in other processes and names for channels, for the tests of this folder."""

import os
import zlib
from collections.abc import Iterator

import pytest

from tests.cluster.peers import Nursery
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR


@pytest.fixture(scope="session")
def nursery_process() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(nursery_process: Nursery) -> Iterator[Nursery]:
    yield nursery_process
    nursery_process.kill_peers()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A channel name of this test's own; whatever the test leaves behind goes, and fails it."""
    name = f"test-{os.getpid()}-{zlib.crc32(request.node.name.encode())}"
    yield name
    left = list(SHM_DIR.glob(f"{PREFIX}{name}*"))
    for path in left:
        path.unlink()
    assert not left
