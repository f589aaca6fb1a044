"""With rounds in flight a guided sequence sits out the round after its own; the others' rounds go on overlapping."""

import numpy as np
import pytest

from tests.runtime.grammar.test_root_masks import listener
from tests.runtime.grammar.world import SPECS, TOKENIZER, Constrained, demo_drafter, params_of
from tests.runtime.models import CHAIN, TREE, engine_config, new_engine
from wingbeat.runtime.grammar.grammar_masker import fill_row
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


def test_rounds_are_launched_before_the_one_before_is_waited_for(loaded, grammars, plain, monkeypatch):
    engine = overlapped(loaded, None)
    events, guided = [], []

    def noted(owner, name, event):
        method = getattr(owner, name)

        def wrapped(*args):
            events.append(event)
            if event == "launch":
                plan = args[0]
                guided.append([seq.masker is not None for seq in plan.decodes])
            return method(*args)

        monkeypatch.setattr(owner, name, wrapped)

    noted(engine.runner, "launch", "launch")
    noted(RoundInFlight, "_result", "wait")
    try:
        assert Mixed(engine, grammars, prompts()[:2], PARAMS[:2]).finish() == plain[:2]
    finally:
        engine.model.remove_taps()
    mixed = [kinds for kinds in guided if len(kinds) == 2]
    assert mixed
    # While both run, the guided one is in every second round, and no round waits for the one before.
    first, last = (
        index for index in (guided.index([True, False]), len(guided) - 1 - guided[::-1].index([True, False]))
    )
    assert guided[first : last + 1] == [[False] if index % 2 else [True, False] for index in range(last + 1 - first)]
    launches = [index for index, event in enumerate(events) if event == "launch"]
    for number in range(first + 1, last):
        assert events[launches[number] - 1] == "wait"
        assert events[: launches[number]].count("wait") == number - 1


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
