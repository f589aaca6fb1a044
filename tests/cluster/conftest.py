"""Peers in other processes and channels of every kind, for the tests of this folder."""

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from peers import InProcessRig, Nursery, ProcessRig, Rig

from wingbeat.cluster import segment

KINDS = ["in-process", "shm", "fake-cuda", pytest.param("cuda_ipc", marks=pytest.mark.gpu)]


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
    left = list(segment.SHM_DIR.glob(f"{segment.PREFIX}{name}*"))
    for path in left:
        path.unlink()
    assert not left


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A verifier's end, and drafters to start for it."""
    if request.param == "in-process":
        rig = InProcessRig()
    else:
        rig = ProcessRig(request.param, request.getfixturevalue("nursery"), request.getfixturevalue("name"))
    yield rig
    rig.verifier.close()


@pytest.fixture(params=KINDS[1:])
def process_rig(request: pytest.FixtureRequest, nursery: Nursery, name: str) -> Iterator[ProcessRig]:
    """The same, of the kinds whose drafter can be killed."""
    rig = ProcessRig(request.param, nursery, name)
    yield rig
    rig.verifier.close()
