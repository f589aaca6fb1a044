"""With rounds in flight, a guided sequence runs in every round, except one round where forced tokens come next."""

from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.grammar.test_root_masks import listener
from tests.runtime.grammar.world import SPECS, TOKENIZER, Constrained, demo_drafter, params_of
from tests.runtime.models import CHAIN, TREE, engine_config, new_engine
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker, fill_row
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.scheduling.request import SamplingParams

TEXTS = ["a = ", "def f(x):\n", "bc = ", "import os\n"]
FREE = SamplingParams(60, 1.0, seed=5, ignore_eos=True)
PARAMS = [params_of(SPECS[0], 1, max_tokens=50), FREE, params_of(SPECS[1], 2), FREE]


class Mixed(Constrained):
    """Requests with a grammar, and free ones."""

    def __init__(self, engine, grammars, prompts, params):
        super().__init__(engine, _Either(grammars), prompts, params)


class _Either:
    def __init__(self, grammars):
        self._grammars = grammars

    def compile(self, spec):
        return None if spec is None else self._grammars.compile(spec)


@pytest.fixture(scope="module")
def plain(loaded, grammars):
    engine = new_engine(loaded, engine_config(TREE, max_model_len=512, num_kv_blocks=300), None)
    try:
        return Mixed(engine, grammars, prompts(), PARAMS).finish()
    finally:
        engine.model.remove_taps()


def prompts():
    return [TOKENIZER.encode(text) for text in TEXTS]


def overlapped(loaded, drafter, shape=TREE, **limits):
    config = engine_config(shape, **{"max_model_len": 512, "num_kv_blocks": 300, "overlap": True, **limits})
    return new_engine(loaded, config, drafter, on_host=False)


TIGHT = {"max_model_len": 128, "num_kv_blocks": 14, "max_num_batched_tokens": 33}


@pytest.mark.few(1)
@pytest.mark.parametrize("limits", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_mixed_batches_write_what_they_write_without_overlap(loaded, grammars, plain, shape, limits):
    for drafter in (None, demo_drafter(shape)):
        engine = overlapped(loaded, drafter, shape, **limits)
        try:
            assert Mixed(engine, grammars, prompts(), PARAMS).finish() == plain
        finally:
            engine.model.remove_taps()
        assert (drafter is None) or engine.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("certain", [False, True], ids=["free", "certain"])
@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_a_guided_sequence_runs_in_every_round_unless_something_is_certain(
    loaded, grammars, plain, monkeypatch, kind, certain
):
    """The sequence's masks are computed between a round's forward pass and the choice of its tokens."""
    if not certain:
        monkeypatch.setattr(GrammarMasker, "may_force", lambda self: False)
    engine = overlapped(loaded, None if kind == "none" else demo_drafter(TREE))
    events, guided = [], []

    def noted(owner, name, event):
        method = getattr(owner, name)

        def wrapped(*args):
            events.append(event)
            if event == "pass":
                guided.append([seq.masker is not None for seq in args[0].decodes])
            return method(*args)

        monkeypatch.setattr(owner, name, wrapped)

    noted(engine.runner.eager, "forward", "pass")
    noted(engine.runner.eager, "decide", "choice")
    noted(RoundInFlight, "_result", "wait")
    try:
        assert Mixed(engine, grammars, prompts()[:2], PARAMS[:2]).finish() == plain[:2]
    finally:
        engine.model.remove_taps()
    first, last = guided.index([True, False]), len(guided) - 1 - guided[::-1].index([True, False])
    together = guided[first : last + 1]
    assert ([False] in together) == certain
    passes = [index for index, event in enumerate(events) if event == "pass"]
    for number in range(first + 1, last + 1):
        # Order: launch of the pass, wait for the round before, choice of tokens.
        until = events.index("choice", passes[number])
        assert events[: passes[number]].count("wait") <= number
        if guided[number] == [True, False] and guided[number - 1] == [True, False]:
            assert events[passes[number] : until].count("wait") == 1


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_trees_whose_masks_come_too_late_are_verified_by_their_roots_alone(loaded, grammars, plain, monkeypatch, shape):
    monkeypatch.setattr("wingbeat.runtime.grammar.grammar_masker.MOST_TREE_S", -1.0)
    monkeypatch.setattr("wingbeat.runtime.grammar.grammar_masker.MOST_SLOW", 10**6)
    monkeypatch.setattr(GrammarMasker, "may_force", lambda self: False)
    for device in (None, RecordingDevice()):
        config = engine_config(shape, max_model_len=512, num_kv_blocks=300, overlap=True)
        engine = build_engine(loaded, config, demo_drafter(shape), InProcessChannel, device, on_host=False)
        try:
            assert Mixed(engine, grammars, prompts(), PARAMS).finish() == plain
        finally:
            engine.model.remove_taps()


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_captured_rounds_that_overlap_write_the_same(loaded, grammars, plain, shape, adaptive):
    shape = replace(shape, adaptive=adaptive)
    config = engine_config(shape, max_model_len=512, num_kv_blocks=300, overlap=True)
    engine = build_engine(loaded, config, demo_drafter(shape), InProcessChannel, RecordingDevice(), on_host=False)
    try:
        assert Mixed(engine, grammars, prompts(), PARAMS).finish() == plain
    finally:
        engine.model.remove_taps()
    assert engine.speculation.num_accepted_tokens > 0


def test_the_drafter_is_told_what_the_roots_allow(loaded, grammars, plain, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.grammar.grammar_masker.MOST_AHEAD_S", 10.0)
    some = prompts()
    drafter = listener([prompt + more + [1] * 8 for prompt, more in zip(some, plain, strict=True)], loaded)
    engine = overlapped(loaded, drafter)
    try:
        run = Mixed(engine, grammars, some, PARAMS)
        assert run.finish() == plain
    finally:
        engine.model.remove_taps()
    told = [(history, mask) for history, mask in drafter.heard if mask is not None and (mask != -1).any()]
    assert len(told) > 5
    for history, mask in told:
        index = next(i for i, prompt in enumerate(some) if history[: len(prompt)] == prompt)
        matcher = grammars.compile(PARAMS[index].grammar).matcher()
        assert all(map(matcher.consume_token, history[len(some[index]) :]))
        expected = np.zeros((1, -(-loaded.vocab_size // 32)), np.int32)
        fill_row(matcher, expected, 0)
        assert (mask == expected[0]).all()
    assert all(output.metrics.num_accepted_tokens > 0 for output in run.last.values())
