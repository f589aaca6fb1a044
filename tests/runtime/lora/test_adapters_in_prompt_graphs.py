"""Captured rounds of prompts whose requests have adapters."""

import pytest

from tests.runtime.lora.test_adapters_lossless import add, engine_of, finish
from tests.runtime.lora_world import lora_world
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.runtime.graphs.graph_runner import Stage


@pytest.mark.slow
def test_prompts_of_several_adapters_share_a_captured_round():
    """A piece's adapter is read from its slot when the graph runs."""
    world = lora_world()
    with engine_of(world, None, RecordingDevice(), max_num_batched_tokens=256) as engine:
        which = {index: index % len(world.adapters) for index in range(len(world.prompts))}
        for index, adapter in which.items():
            add(engine, world, adapter, index)
        tokens, _ = finish(engine)
        stats = engine.stats().graphs
    assert tokens == {str(index): world.expected[adapter][index] for index, adapter in which.items()}
    assert stats.replays[Stage.BASE_PROMPTS] > 0
    assert not stats.eager_runs
