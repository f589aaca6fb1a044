"""Earlier text is continued where that brings more than the drafter, which is then not asked; texts do not change."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.engine.arrivals import Load, ending
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    reference,
)
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, right_tree, wrong_tree
from tests.runtime.watchers import ContextDrafter, FailingEnd, dense_taps
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.llm import build_engine, connect
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.suffix.suffix_texts import SuffixTexts
from wingbeat.runtime.suffix_beside import suffix_beside

SHORT = 40
TIGHT = {"max_model_len": 128, "num_kv_blocks": 20, "max_num_batched_tokens": 24}
SAMPLED = SamplingParams(SHORT, 0.9, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def ref():
    return reference("llama")


@pytest.fixture(scope="module")
def taps(ref):
    return dense_taps(ref)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Text may be continued from the first round on."""
    monkeypatch.setattr(suffix_beside, "FIRST_ROUNDS", 0)


def beside(ref, drafter, shape=TREE, device=None, on_host=None, **limits):
    config = engine_config(shape, suffix_beside=True, **limits)
    return build_engine(ref.loaded, config, drafter, InProcessChannel, device, on_host)


def run(engine, prompts, params):
    return Run(engine, prompts, params).finish()


@pytest.mark.parametrize("rounds", ["host", "device", "graphs"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_known_texts_are_written_again_without_the_drafter(ref, shape, adaptive, rounds, known_costs):
    shape = replace(shape, adaptive=adaptive)
    device = RecordingDevice() if rounds == "graphs" else None
    drafter = eagle_drafter(ref.loaded, shape)
    engine = beside(ref, drafter, shape, device, None if rounds == "host" else False)
    try:
        for params in (greedy_params(SHORT), SAMPLED):
            plain = run(engine, ref.prompts, replace(params, speculation=False))
            assert plain == [text[:SHORT] for text in ref.continuations] or params is SAMPLED
            assert run(engine, ref.prompts, params) == plain
            before = replace(engine.speculation)
            assert run(engine, ref.prompts, params) == plain
            now = engine.speculation
            length = (now.num_accepted_tokens - before.num_accepted_tokens) / (now.num_drafts - before.num_drafts)
            assert length > 3
    finally:
        engine.model.remove_taps()
    assert engine.drafter_state == "attached"


@pytest.mark.parametrize("limits", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("plan", [right_tree, wrong_tree], ids=["right", "wrong"])
def test_texts_under_load_are_those_of_generate(ref, plan, limits):
    loaded, end = ending(ref)
    load = Load(ref, end, seed=3)
    drafter = ScriptedDrafter(ref.sequences, plan, loaded.vocab_size)
    engine = new_engine(loaded, engine_config(suffix_beside=True, **limits), drafter)
    try:
        for _ in range(2):
            tokens, _, reasons = load.play(engine)
            assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    finally:
        engine.model.remove_taps()
    assert engine.speculation.num_accepted_tokens > 0


def asked_and_made(engine, prompts, params):
    """Rounds of sequences with a tree of the drafter's, and with one of text."""
    asked = made = 0

    class Counter:
        def launched(self, flight):
            nonlocal asked, made
            asked, made = asked + sum(flight.plan.with_trees()), made + sum(flight.by_text)

        def settled(self, flight, result): ...
        def ended(self, request_id): ...

    engine.observe(Counter())
    run(engine, prompts, params)
    engine.observe(None)
    return asked, made


def test_who_brings_more_drafts(ref):
    for plan, wins in ((right_tree, "drafter"), (wrong_tree, "text")):
        engine = beside(ref, ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size))
        try:
            run(engine, ref.prompts, greedy_params(SHORT))
            asked, made = asked_and_made(engine, ref.prompts, greedy_params(SHORT))
            assert (asked > 4 * made) if wins == "drafter" else (made > 2 * asked)
        finally:
            engine.model.remove_taps()


@pytest.mark.parametrize("price", [0.0, 1.0])
def test_text_whose_nodes_are_not_worth_their_verification_is_not_used(ref, monkeypatch, price):
    monkeypatch.setattr(Speculation, "text_prices", lambda self, seqs, most: 1.0 + price * np.arange(most + 1))
    engine = beside(ref, ScriptedDrafter(ref.sequences, wrong_tree, ref.loaded.vocab_size))
    try:
        for _ in range(2):
            made = asked_and_made(engine, ref.prompts, greedy_params(SHORT))[1]
        assert (made > 0) == (price == 0.0)
    finally:
        engine.model.remove_taps()


def test_once_no_text_was_used_a_short_context_is_not_enough(ref, monkeypatch):
    contexts, grow = [], SuffixTexts.grow

    def recorded(self, request, levels, least_context=1):
        nodes, match = grow(self, request, levels, least_context), self._match(request)
        contexts.append((least_context, 0 if match is None else match.cursor.length, bool(nodes)))
        return nodes

    monkeypatch.setattr(SuffixTexts, "grow", recorded)
    monkeypatch.setattr(suffix_beside, "LOOK_ROUNDS", 4)
    least = {}
    for plan, used in ((right_tree, False), (wrong_tree, True)):
        contexts.clear()
        engine = beside(ref, ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size))
        try:
            for _ in range(1 + used):
                run(engine, ref.prompts[:1], greedy_params(SHORT))
        finally:
            engine.model.remove_taps()
        least[used] = contexts[-1][0]
        assert all(made <= (length >= asked) for asked, length, made in contexts)
    assert least == {False: suffix_beside.SURE_CONTEXT, True: 1}


def test_a_sequence_alone_copies_beside_one_that_is_drafted_for(ref):
    """Each by itself: the first prompt's text is known, the second one's is not."""
    engine = beside(ref, ScriptedDrafter(ref.sequences, lambda *args: right_tree(*args)[:3], ref.loaded.vocab_size))
    try:
        run(engine, ref.prompts[:1], greedy_params(SHORT))
        asked, made = asked_and_made(engine, ref.prompts[:2], greedy_params(SHORT))
        assert min(asked, made) >= 4
        assert engine.scheduler.running == []
    finally:
        engine.model.remove_taps()


class Useless(ContextDrafter):
    """Checks all pairs before it proposes, and proposes nothing."""

    def propose(self, batch):
        trees = super().propose(batch)
        return trees._replace(num_valid=torch.ones_like(trees.num_valid))


@pytest.mark.parametrize("on_host", [None, False], ids=["host", "device"])
def test_the_drafters_context_is_complete_once_it_is_asked_again(ref, taps, on_host):
    """Pairs of rounds that copied are kept back, and come before the next draft."""
    drafter = Useless(ref, taps)
    engine = beside(ref, drafter, on_host=on_host)
    try:
        for prompt, text in zip(ref.prompts[:4], ref.continuations, strict=False):
            run(engine, [prompt], greedy_params(SHORT))
            before = drafter.num_checked
            assert asked_and_made(engine, [prompt], greedy_params(SHORT - 4))[0] <= 1  # only the first one
            assert drafter.num_checked <= before + 1
            assert run(engine, [prompt], greedy_params()) == [text]
            assert drafter.num_checked > before + 1
    finally:
        engine.model.remove_taps()


@pytest.mark.parametrize("on_host", [None, False], ids=["host", "device"])
def test_text_goes_on_when_the_drafter_is_lost(ref, on_host):
    config, ends = engine_config(suffix_beside=True), []

    def breakable(spec):
        channel = InProcessChannel(spec)
        channel.verifier_end = FailingEnd(channel.verifier_end, "wait", 3, alive=False)
        ends.append(channel)
        return channel

    engine = Engine(ref.loaded, config, eagle_drafter(ref.loaded, TREE).needs, on_host=on_host)
    connect(engine, eagle_drafter(ref.loaded, TREE), breakable)
    try:
        for _ in range(2):
            assert run(engine, ref.prompts, greedy_params(SHORT)) == [text[:SHORT] for text in ref.continuations]
    finally:
        engine.model.remove_taps()
    assert engine.drafter_state == "lost"
    assert engine.speculation.num_accepted_tokens > 8 * SHORT / 2


def test_within_a_fixed_shape_the_drafter_is_asked_alone(ref):
    engine = beside(ref, ScriptedDrafter(ref.sequences, wrong_tree, ref.loaded.vocab_size))
    try:
        run(engine, ref.prompts, greedy_params(SHORT))
        with engine.policy.fixed():
            assert asked_and_made(engine, ref.prompts, greedy_params(SHORT))[1] == 0
        assert asked_and_made(engine, ref.prompts, greedy_params(SHORT))[1] > 0
    finally:
        engine.model.remove_taps()


def test_the_first_rounds_are_the_drafters(ref, monkeypatch):
    monkeypatch.setattr(suffix_beside, "FIRST_ROUNDS", 1000)
    engine = beside(ref, ScriptedDrafter(ref.sequences, wrong_tree, ref.loaded.vocab_size))
    try:
        for _ in range(2):
            asked, made = asked_and_made(engine, ref.prompts, greedy_params(SHORT))
            assert (asked > 0, made) == (True, 0)
    finally:
        engine.model.remove_taps()


def test_rounds_that_overlap_are_refused():
    with pytest.raises(ValueError, match="suffix_beside is True and overlap is True"):
        engine_config(suffix_beside=True, overlap=True)


def test_requests_for_plain_decoding_copy_nothing(ref):
    engine = beside(ref, ScriptedDrafter(ref.sequences, wrong_tree, ref.loaded.vocab_size))
    try:
        for _ in range(2):
            asked = asked_and_made(engine, ref.prompts, greedy_params(SHORT, speculation=False))
            assert asked == (0, 0)
        engine.add_request(Request("x", tuple(ref.prompts[0]), greedy_params(SHORT)))
        engine.abort_request("x")
    finally:
        engine.model.remove_taps()
