"""Rounds in one graph write the texts of plain rounds, and draft what the drafter's own passes draft."""

from dataclasses import replace

import pytest

from tests.runtime.models import CHAIN, TREE, Run, engine_config, random_head, random_prompts, reference
from tests.runtime.recorded_graphs import RepeatingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams

SHAPES = {"chain": replace(CHAIN, draft_steps=3), "tree": replace(TREE, draft_steps=3)}
PROMPTS = random_prompts((5, 40, 9, 70, 3, 17))
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
TEMPERED = replace(GREEDY, temperature=0.9, seed=4, max_tokens=21)
RULED = replace(TEMPERED, top_p=0.8, max_tokens=11)
WAYS = {"greedy": [GREEDY], "tempered": [GREEDY, TEMPERED], "some with rules": [TEMPERED, GREEDY, RULED]}
by_shape = pytest.mark.parametrize("shape", SHAPES)


def engine_of(config: EngineConfig, captured: bool = True) -> tuple[Engine, EagleDrafter]:
    """An engine and a head's drafter in its process."""
    loaded = reference("llama").loaded
    devices = [RepeatingDevice() if captured else None for _ in range(2)]
    drafter = EagleDrafter(random_head(loaded), config.speculation, devices[0])
    return build_engine(loaded, config, drafter, InProcessChannel, devices[1], on_host=False), drafter


def params(way: str, speculation: bool) -> list[SamplingParams]:
    kinds = WAYS[way]
    return [replace(kinds[index % len(kinds)], speculation=speculation) for index in range(len(PROMPTS))]


def text_of(engine: Engine, given: list[SamplingParams]) -> list[list[int]]:
    try:
        return Run(engine, PROMPTS, given).finish()
    finally:
        engine.model.remove_taps()


@pytest.mark.few(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "one behind"])
@pytest.mark.parametrize("way", WAYS)
@by_shape
def test_the_text_is_that_of_plain_rounds(shape, way, overlap):
    """There are more requests than slots, of prompts that come in chunks, and they end at different lengths."""
    limits = engine_config(SHAPES[shape], max_num_seqs=3, max_num_batched_tokens=32, overlap=overlap)
    plain, _ = engine_of(limits, captured=False)
    expected = text_of(plain, params(way, False))
    engine, drafter = engine_of(limits)
    assert text_of(engine, params(way, True)) == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.WHOLE_ROUND] > 10
    assert drafter.graph_stats.replays[Stage.DRAFT_PROPOSAL], "beside prompts"
    assert engine.drafter_state == "attached"


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "one behind"])
@by_shape
def test_what_is_drafted_is_the_same(shape, overlap, monkeypatch):
    """Drafts are accepted by chance here, so that they are the text, and paths of several tokens are committed."""
    monkeypatch.setenv(BENCHMARK_VARIABLE, "1")
    limits = engine_config(SHAPES[shape], max_num_seqs=3, overlap=overlap, forced_acceptance=ForcedAcceptance.flat(0.7))
    texts, counts = [], []
    for is_whole in (True, False):
        engine, _ = engine_of(limits)
        if not is_whole:
            engine.runner.whole = None
        texts.append(text_of(engine, params("greedy", True)))
        counts.append(engine.speculation)
        assert bool(engine.runner.graphs.stats.replays.get(Stage.WHOLE_ROUND)) == is_whole
    assert texts[0] == texts[1]
    assert counts[0] == counts[1]
    assert counts[0].acceptance_length > 1.8
