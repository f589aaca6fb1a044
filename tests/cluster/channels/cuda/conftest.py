"""A channel through the memory of a fake GPU."""

from collections.abc import Iterator

import pytest

from tests.cluster.channels.cuda.cuda_pair import Pair
from tests.cluster.channels.cuda.fake_cuda import FakeMachine


@pytest.fixture
def pair(name: str) -> Iterator[Pair]:
    """Both ends of a channel through the memory of a fake GPU."""
    pair = Pair(name, FakeMachine())
    yield pair
    pair.machine.busy = pair.drafter_cuda.stuck = False
    pair.drafter.close()
    pair.verifier.close()
