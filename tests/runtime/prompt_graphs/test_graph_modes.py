"""Rounds with prompt chunks are captured in one mode of graphs and not in the other."""

import pytest

from tests.runtime.models import TREE, Run, engine_config, greedy_params, reference
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round.shapes import round_shapes

SHORT = 48


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "decode_only"])
def test_prompts_are_captured_where_the_mode_says_so(mode):
    """The text is the same, and the shapes that are left out are told as stages that run eagerly."""
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)
    engine = build_engine(
        ref.loaded, engine_config(TREE, cuda_graphs=mode), drafter, InProcessChannel, RecordingDevice()
    )
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == [row[:SHORT] for row in ref.continuations]
    engine.model.remove_taps()
    stats = engine.stats().graphs
    stages = {stage for stage, _ in stats.captured}
    assert {Stage.BASE_DECODING, Stage.BASE_VERIFICATION} <= stages
    decodes, full = round_shapes(engine_config(TREE))
    assert full.num_mixed() > 0
    if mode == "full":
        assert {Stage.BASE_MIXED, Stage.BASE_PROMPTS} <= stages
        assert stats.replays[Stage.BASE_MIXED] > 0
        assert not stats.eager_runs
    else:
        assert not {Stage.BASE_MIXED, Stage.BASE_PROMPTS} & stages
        assert set(stats.eager_runs) == {Stage.BASE_MIXED, Stage.BASE_PROMPTS}
        untried = stats.counts()["eager"] - full.num_graphs
        assert untried == sum(len(shape.choices) - 1 for shape in decodes.values()) * 2, "choices that wait on a CPU"
