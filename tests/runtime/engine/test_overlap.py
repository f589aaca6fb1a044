"""A host that is one round behind its device emits the same tokens as a host that waits for every round."""

from dataclasses import replace
from functools import partial

import pytest

from tests.needs import needs
from tests.runtime.engine.arrivals import Load, drafter_of, ending
from tests.runtime.models import (
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    random_model,
)
from tests.runtime.watchers import ContextDrafter, FailingEnd
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import connect
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)

DRAFTERS = ["none", "right", "wrong", "ngram", "eagle"]
SHORT = 48
TIGHT = {"max_model_len": 128, "num_kv_blocks": 12, "max_num_batched_tokens": 33}


@pytest.fixture
def rig(rigs, ref):
    return partial(rigs, ref, overlap=True)


def first(ref, count=SHORT):
    return [tokens[:count] for tokens in ref.continuations]


@pytest.mark.parametrize("limits", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_both_loops_write_the_same_under_load(ref, engine_of, kind, limits):
    loaded, end = ending(ref)
    load = Load(ref, end, seed=3)
    engine = engine_of(loaded, drafter_of(kind, ref), **limits)
    tokens, aborted, reasons = load.play(engine)
    plain = load.play(engine_of(loaded, drafter_of(kind, ref), overlap=False, **limits))
    finished = reasons.keys() & plain[2].keys()
    for name in finished:
        assert tokens[name] == plain[0][name] == load.expected.get(name, tokens[name])
        assert reasons[name] == plain[2][name]
    for name in aborted & load.expected.keys():
        assert tokens[name] == load.expected[name][: len(tokens[name])]
    assert len(finished) > 12
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(reasons.values())
    assert (engine.stats().num_preemptions > 0) == ("num_kv_blocks" in limits)
    assert engine.block_manager.hit_tokens > 0


@pytest.mark.parametrize("kind", ["right", "random", "eagle"])
def test_trees_in_fixed_shapes_are_the_same_trees(ref, engine_of, kind):
    """As on an accelerator: trees are not cut to the nodes that a round needs; an unusable tree becomes a bare root."""
    loaded, end = ending(ref)
    load = Load(ref, end, seed=7)
    engine = engine_of(loaded, drafter_of(kind, ref), on_host=False, **TIGHT)
    tokens, _, reasons = load.play(engine)
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    assert engine.speculation.num_accepted_tokens > 0


def test_each_round_is_launched_and_published_before_the_one_before_is_waited_for(ref, engine_of, monkeypatch):
    engine = engine_of(ref.loaded, drafter_of("right", ref))
    events = []

    def noted(owner, name, event):
        method = getattr(owner, name)

        def wrapped(*args):
            events.append(event)
            return method(*args)

        monkeypatch.setattr(owner, name, wrapped)

    noted(engine.runner, "launch", "launch")
    noted(engine.drafting, "publish", "publish")
    # `wait` may be called twice; the actual wait happens once, in `_result`.
    noted(RoundInFlight, "_result", "wait")
    run = Run(engine, ref.prompts[:1], greedy_params(12))
    assert engine.step() == []
    assert run.finish() == [ref.continuations[0][:12]]
    # Three rounds: the prompt, a full path of 6, and the last 5 tokens. The tokens of a fourth are discarded.
    assert events == ["launch", "publish", *["launch", "publish", "wait"] * 3, "wait"]


def test_the_last_token_is_not_followed_by_a_round_when_the_limit_says_so(ref, engine_of):
    engine = engine_of(ref.loaded, None)
    assert Run(engine, ref.prompts[:2], greedy_params(5)).finish() == [tokens[:5] for tokens in ref.continuations[:2]]
    assert engine.stats().phases.num_rounds == 5


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 9])
def test_a_drafter_follows_after_prefixes_it_never_saw(ref, taps, rig, budget):
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter, max_num_batched_tokens=budget)
    one.run(ref.prompts, greedy_params(SHORT, speculation=False))
    assert drafter.num_checked == 0
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    assert one.finish(run) == first(ref)
    assert one.engine.stats().num_replayed_tokens > 100
    assert all(output.metrics.num_drafts > 0 for output in run.last.values())
    assert one.engine.speculation.acceptance_length > 4


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"max_model_len": 128, "num_kv_blocks": 20}], ids=["roomy", "preemption"])
def test_the_drafters_context_is_complete(ref, taps, rig, limits):
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter, **limits)
    assert one.run(ref.prompts, greedy_params(SHORT)) == first(ref)
    assert (one.engine.stats().num_preemptions > 0) == ("num_kv_blocks" in limits)
    assert drafter.num_checked >= 8 * SHORT / 6
    assert one.engine.speculation.acceptance_length > 4


@pytest.mark.slow
@pytest.mark.parametrize("what", ["acquire", "wait"])
def test_a_lost_drafter_costs_no_request_and_its_heir_joins(ref, taps, rig, what):
    one = rig(ContextDrafter(ref, taps), lambda end: FailingEnd(end, what, 5, alive=False))
    run = Run(one.engine, ref.prompts, greedy_params())
    for _ in range(9):
        one.step(run)
    assert one.engine.drafter_state == "lost"
    heir = ContextDrafter(ref, taps)
    one.replace(heir)
    assert one.finish(run) == ref.continuations
    assert heir.num_checked > 8
    assert one.engine.stats().num_replayed_tokens > 0


@pytest.mark.slow
def test_a_drafter_killed_under_load_is_replaced(ref, engine_of):
    loaded, end = ending(ref)
    load = Load(ref, end, seed=3)
    channels = []

    def breakable(spec):
        channel = InProcessChannel(spec)
        channel.verifier_end = FailingEnd(channel.verifier_end, "wait", after=10**6, alive=False)
        channels.append(channel)
        return channel

    engine = engine_of(loaded, drafter_of("eagle", ref), channel_factory=breakable, **TIGHT)

    def at_round(number):
        if number == 12:
            channels[0].verifier_end.fail()
        if number == 20:
            assert engine.drafter_state == "lost"
            connect(engine, drafter_of("random", ref), InProcessChannel)

    tokens, _, reasons = load.play(engine, at_round)
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    assert engine.drafter_state == "attached"


def test_an_aborted_request_leaves_at_once_and_its_round_in_flight_is_void(ref, engine_of):
    engine = engine_of(ref.loaded, drafter_of("right", ref), max_num_seqs=2)
    run = Run(engine, ref.prompts[:3], greedy_params(SHORT))
    for _ in range(3):
        run.step()
    before = list(run.tokens[0])
    engine.abort_request("0")
    engine.check_integrity()
    assert engine.stats().num_running == 1
    tokens = run.finish()
    assert tokens[0] == before
    assert tokens[1:] == first(ref)[1:3]


def test_attaching_settles_first_and_an_abort_takes_settled_tokens_with_it(ref, engine_of):
    engine = engine_of(ref.loaded, None)
    run = Run(engine, ref.prompts[:2], greedy_params(SHORT))
    for _ in range(3):
        run.step()
    connect(engine, drafter_of("random", ref), InProcessChannel)
    before = list(run.tokens[0])
    engine.abort_request("0")
    tokens = run.finish()
    assert tokens == [before, ref.continuations[1][:SHORT]]
    assert len(before) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["right", "eagle"])
def test_on_a_gpu_both_loops_write_the_same(ref, kind):
    loaded = prepare_model(random_model("llama").to("cuda"), "llama")
    tokens = []
    for overlap in (False, True):
        engine = new_engine(loaded, engine_config(overlap=overlap), drafter_of(kind, ref))
        tokens.append(Run(engine, ref.prompts, greedy_params(SHORT)).finish())
        assert engine.speculation.num_drafts > 0
        engine.model.remove_taps()
    assert tokens[0] == tokens[1]


@needs("adaptive")
@pytest.mark.slow
def test_adaptive_trees_are_learned_from_one_round_late(ref, engine_of):
    loaded, end = ending(ref)
    load = Load(ref, end, seed=3)
    adaptive = replace(TREE, adaptive=True)
    engine = engine_of(loaded, eagle_drafter(ref.loaded, TREE), speculation=adaptive, **TIGHT)
    tokens, _, reasons = load.play(engine)
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    assert sum(engine.stats().policy.decisions.values()) > 0


def test_a_host_that_is_the_device_waits_unless_told_otherwise(ref, engine_of):
    for overlap in (None, False, True):
        assert engine_of(ref.loaded, None, overlap=overlap).overlap is bool(overlap)
