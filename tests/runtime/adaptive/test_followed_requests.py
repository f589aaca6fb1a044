"""While plain decoding wins, the drafter gets few contexts; once drafts win, it catches up with all that run."""

from dataclasses import replace

import pytest

from tests.runtime.adaptive.losing_policy import POLICY, SwitchedPolicy
from tests.runtime.hybrids import CONFIGS, hybrid, needs_states
from tests.runtime.models import TREE, Run, greedy_params, reference
from tests.runtime.watchers import ContextDrafter, FailingEnd, dense_taps
from wingbeat.runtime.adaptive import adaptive_speculation
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = [pytest.mark.few(1), pytest.mark.usefixtures("known_costs")]

SURE, ONE_OF = 16, 8
BUDGET = 64
MODELS = ["llama", *(pytest.param(name, marks=needs_states) for name in CONFIGS)]


class HearingDrafter(ContextDrafter):
    """A drafter that counts the pairs that it receives."""

    num_told = 0

    def commit(self, batch):
        super().commit(batch)
        self.num_told += sum(batch.chunk_lens) + len(batch.decode_slots)


class Plain:
    """An engine whose policy has decoded plainly for so long that most requests are not followed."""

    def __init__(self, rigs, model, **limits):
        self.ref = reference("llama") if model == "llama" else hybrid(model)
        self.taps = dense_taps(self.ref)
        self.drafter = self.new_drafter()
        limits = {"block_size": 4, "num_kv_blocks": 400, "max_num_batched_tokens": BUDGET} | limits
        if model != "llama":
            limits["state_interval"] = 8
        self.rig = rigs(self.ref, self.drafter, speculation=replace(TREE, adaptive=True), **limits)
        self.engine = self.rig.engine
        self.rig.run(self.ref.prompts[:1], self.params)
        self.drafter.num_told = 0

    @property
    def length(self):
        return min(map(len, self.ref.continuations))

    @property
    def params(self):
        return greedy_params(self.length)

    def new_drafter(self):
        return HearingDrafter(self.ref, self.taps)

    def texts(self, prompts=slice(None)):
        return [text[: self.length] for text in self.ref.continuations[prompts]]

    def start(self):
        """All prompts at once, until three decode."""
        run = Run(self.engine, self.ref.prompts, self.params)
        while sum(map(bool, run.tokens)) < 3:
            self.rig.step(run)
        return run

    def followed(self):
        return [seq.draft.followed for seq in self.engine.scheduler.running]

    def wins(self, monkeypatch):
        monkeypatch.setattr(SwitchedPolicy, "wins", True)


@pytest.fixture
def plain(rigs, monkeypatch):
    monkeypatch.setattr(POLICY, SwitchedPolicy)
    monkeypatch.setattr(SwitchedPolicy, "wins", False)
    monkeypatch.setattr(adaptive_speculation, "SURE", SURE)
    monkeypatch.setattr(adaptive_speculation, "ONE_OF", ONE_OF)

    def make(model="llama", **limits):
        return Plain(rigs, model, **limits)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_one_of_eight_requests_is_told_of_while_drafts_lose(plain, model):
    one = plain(model)
    # The second followed request has a cached prompt whose first run was not followed.
    order = [index % min(7, len(one.ref.prompts)) for index in range(2 * ONE_OF)]
    told = []
    for index in order:
        before = one.drafter.num_told
        run = Run(one.engine, [one.ref.prompts[index]], one.params)
        assert one.rig.finish(run) == one.texts(slice(index, index + 1))
        told.append(one.drafter.num_told > before)
    assert told == ([True] + [False] * (ONE_OF - 1)) * 2
    assert one.engine.stats().policy.decisions["probe_draft"] > 0
    if model == "llama":  # hybrids may have kept no state at the end of the common prefix
        assert one.engine.stats().num_replayed_tokens > 0


def test_who_asks_for_drafts_is_always_followed(plain):
    one = plain()
    for _ in range(2):
        assert one.rig.run(one.ref.prompts[:3], one.params) == one.texts(slice(3))
    before = one.drafter.num_told
    run = Run(one.engine, one.ref.prompts[:1], replace(one.params, force_drafts=True))
    assert one.rig.finish(run) == one.texts(slice(1))
    assert one.drafter.num_told > before
    assert run.last[0].metrics.num_drafts > 2


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [BUDGET, 12])
@pytest.mark.parametrize("model", MODELS)
def test_drafts_that_win_again_are_for_all_that_run(plain, monkeypatch, model, budget, overlap):
    if overlap and model != "llama":
        pytest.skip("models with states keep no round in flight")
    one = plain(model, max_num_batched_tokens=budget, overlap=overlap)
    run = one.start()
    assert sum(one.followed()) == 1
    one.wins(monkeypatch)
    assert one.rig.finish(run) == one.texts()
    drafted = [output.metrics.num_drafts > 0 for output in run.last.values()]
    assert all(drafted) if budget == BUDGET else any(drafted)  # replays get what decodes leave of the budget
    assert one.engine.stats().num_replayed_tokens > 0
    run = Run(one.engine, one.ref.prompts, one.params)
    one.rig.step(run)
    assert all(one.followed())
    assert one.rig.finish(run) == one.texts()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_another_drafter_begins_with_who_is_followed_and_catches_up_with_all(plain, monkeypatch, model):
    one = plain(model)
    run = one.start()
    heir = one.new_drafter()
    one.rig.replace(heir)
    for _ in range(4):
        one.rig.step(run)
    assert sum(one.followed()) <= 1
    one.wins(monkeypatch)
    assert one.rig.finish(run) == one.texts()
    assert heir.num_checked > 0
    assert sum(output.metrics.num_drafts > 0 for output in run.last.values()) == len(one.ref.prompts)


@pytest.mark.slow
def test_a_drafter_that_dies_while_all_are_caught_up_with_costs_no_request(plain, monkeypatch):
    one = plain(max_num_batched_tokens=9)
    one.rig.replace(one.new_drafter(), lambda end: FailingEnd(end, "wait", 4, False))
    run = one.start()
    one.wins(monkeypatch)
    while one.engine.drafter_state == "attached":
        one.rig.step(run)
    heir = one.new_drafter()
    one.rig.replace(heir)
    assert one.rig.finish(run) == one.texts()
    assert heir.num_checked > 0


def test_where_nobody_could_be_probed_for_long_one_is_followed(plain, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.adaptive.policy.FORGET_ROUNDS", 4)
    one = plain()
    one.rig.run(one.ref.prompts[:1], one.params)  # the first of eight, which is the one that is followed
    before = one.engine.stats().policy.decisions["probe_draft"]
    monkeypatch.setattr(one.engine.policy.current.policy, "_until_probe", 3)
    run = Run(one.engine, one.ref.prompts[1:4], one.params)
    assert one.rig.finish(run) == one.texts(slice(1, 4))
    assert one.engine.stats().policy.decisions["probe_draft"] > before
    assert sum(output.metrics.num_drafts > 0 for output in run.last.values()) >= 1


@pytest.mark.slow
def test_sampled_texts_are_those_of_plain_decoding(plain, monkeypatch):
    one = plain()
    drawn = [
        SamplingParams(max_tokens=64, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True) for seed in range(8)
    ]
    texts = one.rig.run(one.ref.prompts, [replace(params, speculation=False) for params in drawn])
    one.ref = replace(one.ref, continuations=texts)
    monkeypatch.setattr(one.drafter, "ref", one.ref)
    monkeypatch.setattr(one.drafter, "true_taps", dense_taps(one.ref))
    run = Run(one.engine, one.ref.prompts, drawn)
    for _ in range(4):
        one.rig.step(run)
    one.wins(monkeypatch)
    assert one.rig.finish(run) == texts
    assert all(output.metrics.num_drafts > 0 for output in run.last.values())
    assert one.engine.stats().num_replayed_tokens > 0
