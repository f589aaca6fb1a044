"""A host one round behind its device hands out the tokens of a host that waits for every round."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.runtime.models import (
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    random_model,
    random_prompts,
    reference,
)
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_tree, wrong_tree
from tests.runtime.watchers import ContextDrafter, FailingEnd, Rig, dense_taps
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.ngram import NgramDrafter
from wingbeat.runtime.llm import build_engine, connect
from wingbeat.runtime.scheduling.request import FinishReason, Request, SamplingParams
from wingbeat.runtime.verifier.loader import prepare_model
from wingbeat.runtime.verifier.round import RoundInFlight

pytestmark = pytest.mark.few(1)

DRAFTERS = ["none", "right", "wrong", "ngram", "eagle"]
SHORT = 48
TIGHT = {"max_model_len": 128, "num_kv_blocks": 12, "max_num_batched_tokens": 33}


@pytest.fixture(scope="module")
def ref():
    return reference("llama")


@pytest.fixture(scope="module")
def taps(ref):
    return dense_taps(ref)


@pytest.fixture
def engine_of():
    made = []

    def make(loaded, drafter, on_host=None, channel_factory=InProcessChannel, **overrides):
        config = engine_config(**({"overlap": True} | overrides))
        made.append(build_engine(loaded, config, drafter, channel_factory, on_host=on_host))
        return made[-1]

    yield make
    for engine in made:
        engine.model.remove_taps()


@pytest.fixture
def rig(ref):
    made = []

    def make(drafter, end_of=lambda end: end, **limits):
        made.append(Rig(ref, drafter, end_of, overlap=True, **limits))
        return made[-1]

    yield make
    for one in made:
        one.engine.model.remove_taps()


def drafter_of(kind, ref):
    plans = {"right": right_tree, "wrong": wrong_tree, "random": random_tree}
    if kind in plans:
        return ScriptedDrafter(ref.sequences, plans[kind], ref.loaded.vocab_size)
    return {"none": None, "ngram": NgramDrafter(TREE), "eagle": eagle_drafter(ref.loaded, TREE)}[kind]


def first(ref, count=SHORT):
    return [tokens[:count] for tokens in ref.continuations]


class Load:
    """Requests that arrive, end and are aborted at random rounds; greedy ones know what they must write."""

    def __init__(self, ref, end, seed, count=20):
        chance = random.Random(seed)
        self.arrivals: dict[int, list[Request]] = {}
        self.aborts: dict[int, list[str]] = {}
        self.expected: dict[str, list[int]] = {}
        """Of greedy requests."""
        for number in range(count):
            name, index, at = str(number), chance.randrange(len(ref.prompts)), chance.randrange(20)
            limit = chance.randrange(1, 4) if chance.random() < 0.3 else chance.randrange(4, 64)
            params = {"max_tokens": limit, "ignore_eos": chance.random() < 0.5, "speculation": chance.random() < 0.85}
            params |= {"temperature": 0.0} if chance.random() < 0.8 else {"temperature": 0.9, "seed": number}
            request = Request(name, tuple(ref.prompts[index]), SamplingParams(**params))
            self.arrivals.setdefault(at, []).append(request)
            if chance.random() < 0.15:
                self.aborts.setdefault(at + chance.randrange(1, 12), []).append(name)
            if params["temperature"] == 0.0:
                tokens = ref.continuations[index][:limit]
                ends = end in tokens and not params["ignore_eos"]
                self.expected[name] = tokens[: tokens.index(end) + 1] if ends else tokens

    def play(self, engine, at_round=lambda number: None):
        """Tokens by request, of which are aborted, and how the others ended."""
        tokens, reasons, aborted = {}, {}, set()
        number, last = 0, max([*self.arrivals, *self.aborts])
        while number <= last or engine.has_unfinished_requests():
            for request in self.arrivals.get(number, []):
                engine.add_request(request)
                tokens[request.request_id] = []
            for name in self.aborts.get(number, []):
                engine.abort_request(name)
                aborted |= {name} - set(reasons)
            at_round(number)
            for output in engine.step():
                assert output.request_id not in reasons, "an output after the last one"
                assert output.request_id not in aborted, "an output after an abort"
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
            engine.check_integrity()
            number += 1
        assert reasons.keys() == tokens.keys() - aborted
        stats = engine.stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks - 1)
        return tokens, aborted, reasons


def ending(ref):
    """The verifier with an end token that some texts meet early, some late and some never."""
    end = ref.continuations[0][9]
    return replace(ref.loaded, eos_token_ids=frozenset({end})), end


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
    """As on an accelerator: nothing is cut to what a round needs, and a tree that does not count is a bare root."""
    loaded, end = ending(ref)
    load = Load(ref, end, seed=7)
    engine = engine_of(loaded, drafter_of(kind, ref), on_host=False, **TIGHT)
    tokens, _, reasons = load.play(engine)
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    assert engine.speculation.num_accepted_tokens > 0


class Blindfold(TorchDispatchMode):
    """Fails where the host looks at device data, which on an accelerator would be a wait for it."""

    WAITS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        waits = by_mask or name in self.WAITS
        assert not waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


def blind(owner, name, monkeypatch):
    """Let a method look at no tensor's data."""
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        with Blindfold(), monkeypatch.context() as patch:
            for look in ("tolist", "numpy", "__array__"):
                patch.setattr(torch.Tensor, look, None)
            return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_the_blindfold_is_tight():
    for look in (lambda t: int(t.max()), lambda t: bool(t.any()), lambda t: t[t > 0]):
        for mode in (torch.inference_mode(), torch.no_grad()):
            with mode, pytest.raises(AssertionError, match="waits for the device"), Blindfold():
                look(torch.arange(3))


def seeing(method):
    """The drafter's side may look: it is another process."""

    def wrapped(*args, **kwargs):
        with _disable_current_modes(), pytest.MonkeyPatch.context() as patch:
            for look, original in LOOKS.items():
                patch.setattr(torch.Tensor, look, original)
            return method(*args, **kwargs)

    return wrapped


class SeeingChannel(InProcessChannel):
    """A channel whose drafter may look."""

    @property
    def pump(self):
        return self._doorbell.pump

    @pump.setter
    def pump(self, pump):
        self._doorbell.pump = seeing(pump)


LOOKS = {look: getattr(torch.Tensor, look) for look in ("tolist", "numpy", "__array__")}


@pytest.mark.parametrize("kind", ["none", "right", "eagle", "ngram"])
def test_nothing_before_the_wait_looks_at_device_data(ref, engine_of, monkeypatch, kind):
    loaded, end = ending(ref)
    load = Load(ref, end, seed=11, count=12)
    engine = engine_of(loaded, drafter_of(kind, ref), on_host=False, channel_factory=SeeingChannel)
    for owner, name in [
        (engine.scheduler, "schedule"),
        (engine.slots, "load"),
        (engine.drafting, "collect"),
        (engine.runner, "launch"),
        (engine.drafting, "publish"),
    ]:
        blind(owner, name, monkeypatch)
    tokens, _, reasons = load.play(engine)
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    assert engine.speculation.num_drafts > 0 or kind == "none"


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
    # `wait` may be called twice and waits once: here.
    noted(RoundInFlight, "_result", "wait")
    run = Run(engine, ref.prompts[:1], greedy_params(12))
    assert engine.step() == []
    assert run.finish() == [ref.continuations[0][:12]]
    # The prompt, a full path of 6 and the 5 tokens left: three rounds, and a fourth whose tokens belong to nobody.
    assert events == ["launch", "publish", *["launch", "publish", "wait"] * 3, "wait"]


def test_the_last_token_is_not_followed_by_a_round_when_the_limit_says_so(ref, engine_of):
    engine = engine_of(ref.loaded, None)
    assert Run(engine, ref.prompts[:2], greedy_params(5)).finish() == [tokens[:5] for tokens in ref.continuations[:2]]
    assert engine.stats().phases.num_rounds == 5


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


@pytest.mark.parametrize("limits", [{}, {"max_model_len": 128, "num_kv_blocks": 20}], ids=["roomy", "preemption"])
def test_the_drafters_context_is_complete(ref, taps, rig, limits):
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter, **limits)
    assert one.run(ref.prompts, greedy_params(SHORT)) == first(ref)
    assert (one.engine.stats().num_preemptions > 0) == ("num_kv_blocks" in limits)
    assert drafter.num_checked >= 8 * SHORT / 6
    assert one.engine.speculation.acceptance_length > 4


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
            connect(engine, drafter_of("ngram", ref), InProcessChannel)

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
    connect(engine, NgramDrafter(TREE), InProcessChannel)
    before = list(run.tokens[0])
    engine.abort_request("0")
    tokens = run.finish()
    assert tokens == [before, ref.continuations[1][:SHORT]]
    assert len(before) == 2


@pytest.mark.gpu
def test_on_a_gpu_only_the_tokens_are_waited_for():
    loaded = prepare_model(random_model("llama").to("cuda"), "llama")
    prompts = random_prompts((5, 40, 17))
    tokens = {}
    for overlap in (False, None):
        engine = new_engine(loaded, engine_config(overlap=overlap))
        assert engine.overlap is (overlap is None)
        run = Run(engine, prompts, greedy_params(SHORT))
        run.step()  # kernels are compiled and memory is pinned for the first time
        torch.cuda.set_sync_debug_mode("error")
        try:
            tokens[overlap] = run.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            engine.model.remove_taps()
    assert tokens[None] == tokens[False]


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
