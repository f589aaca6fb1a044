"""Fixtures shared by the engine's tests."""

import pytest

from tests.runtime.models import engine_config, reference
from tests.runtime.watchers import Rig, dense_taps
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine


@pytest.fixture(scope="module")
def ref():
    return reference("llama")


@pytest.fixture(scope="module")
def taps(ref):
    return dense_taps(ref)


@pytest.fixture
def rigs():
    """Factory of `Rig`s; the taps are removed from their models after the test."""
    made = []

    def make(ref, drafter, end_of=lambda end: end, **limits):
        made.append(Rig(ref, drafter, end_of, **limits))
        return made[-1]

    yield make
    for one in made:
        one.engine.model.remove_taps()


@pytest.fixture
def engine_of():
    """Factory of engines with overlap, from a model, a drafter and limits."""
    made = []

    def make(loaded, drafter, on_host=None, channel_factory=InProcessChannel, **overrides):
        config = engine_config(**({"overlap": True} | overrides))
        made.append(build_engine(loaded, config, drafter, channel_factory, on_host=on_host))
        return made[-1]

    yield make
    for engine in made:
        engine.model.remove_taps()
