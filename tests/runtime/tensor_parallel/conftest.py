"""A fixture of this folder: the process of a second rank."""

import pytest

from tests.runtime.tensor_parallel.two_ranks import SecondRank


@pytest.fixture(scope="module")
def second():
    rank = SecondRank()
    yield rank
    rank.kill()
