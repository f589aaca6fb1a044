"""A late drafter costs a bounded wait: plain rounds go on until its reply arrives."""

import ast
from pathlib import Path

import pytest

import wingbeat.runtime
from tests.runtime.models import Run, greedy_params
from tests.runtime.watchers import ContextDrafter, SilentEnd
from wingbeat.runtime.engine.drafter_waits import FIRST_REPLY_S, LEAST_S, DrafterWaits

pytestmark = pytest.mark.few(1)

SHORT = 48
TIMEOUT_S = 5.0
NUM_SILENT = 12
WAITING = {"wait_reply", "acquire_outcome"}
MAY_WAIT = {"engine/drafter_waits.py", "adaptive/calibration.py"}
"""Files that may wait for a drafter: bounded waits, and the calibration, during which nothing else runs."""


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def new_rig(rigs, ref, taps, **limits):
    ends, clock = [], Clock()
    one = rigs(ref, ContextDrafter(ref, taps), lambda end: ends.append(SilentEnd(end)) or ends[-1], **limits)
    waits = one.engine.drafting.waits = DrafterWaits(TIMEOUT_S, on_cpu=True, clock=clock)
    return one, ends[0], waits, clock


def rounds(one, run, count):
    """Run this many rounds, each of which must add tokens to every request."""
    for _ in range(count):
        before = [len(tokens) for tokens in run.tokens]
        one.step(run)
        assert all(len(tokens) > had for tokens, had in zip(run.tokens, before, strict=True))


@pytest.mark.parametrize("what", sorted(WAITING))
@pytest.mark.parametrize("overlap", [False, True], ids=["lock-step", "overlap"])
def test_rounds_go_on_while_a_drafter_is_silent_and_it_is_drafted_with_again(ref, taps, rigs, what, overlap):
    one, end, _, _ = new_rig(rigs, ref, taps, overlap=overlap)
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    while min(map(len, run.tokens)) < 4:
        one.step(run)
    end.silent = {what}
    while one.engine.drafter_state == "attached":
        one.step(run)
    rounds(one, run, NUM_SILENT)
    assert one.engine.drafter_state == "late"
    assert max(end.waited) <= LEAST_S
    assert end.waited[-NUM_SILENT:] == [0.0] * NUM_SILENT
    assert one.engine.stats().plain_rounds["drafter_late"] >= NUM_SILENT - 1, "of the last round the host may not know"
    end.silent = set()
    before = one.engine.speculation.num_drafts
    assert one.finish(run) == [tokens[:SHORT] for tokens in ref.continuations]
    assert one.engine.drafter_state == "attached"
    assert one.engine.speculation.num_drafts > before
    assert one.engine.stats().num_drafters_attached == 1


def test_a_late_drafter_is_lost_once_its_patience_is_over(ref, taps, rigs):
    one, end, _, clock = new_rig(rigs, ref, taps)
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    end.silent = {"wait_reply"}
    while one.engine.drafter_state == "attached":
        one.step(run)
    clock.now += TIMEOUT_S - 0.01
    one.step(run)
    assert one.engine.drafter_state == "late"
    clock.now += 0.02
    one.step(run)
    assert one.engine.drafter_state == "lost"
    one.replace(ContextDrafter(ref, taps))
    assert one.finish(run) == [tokens[:SHORT] for tokens in ref.continuations]
    assert one.engine.drafter_state == "attached"


def test_nobody_counts_as_asked_for_while_the_drafter_is_late(ref, taps, rigs):
    """Tokens that other drafts yield in a round must not count against the drafter's trees."""
    one, end, _, _ = new_rig(rigs, ref, taps)
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    while not any(seq.draft.tree_requested for seq in one.engine.scheduler.running):
        one.step(run)
    end.silent = {"wait_reply"}
    one.step(run)
    assert one.engine.drafter_state == "late"
    assert not any(seq.draft.tree_requested for seq in one.engine.scheduler.running)


@pytest.mark.parametrize("answers", [True, False])
def test_an_idle_engine_looks_for_a_late_drafter_too(ref, taps, rigs, answers):
    one, end, _, clock = new_rig(rigs, ref, taps)
    run = Run(one.engine, ref.prompts[:2], greedy_params(SHORT))
    end.silent = {"wait_reply"}
    one.finish(run)
    one.engine.look_for_late_drafter()
    assert one.engine.drafter_state == "late"
    if answers:
        end.silent = set()
    else:
        clock.now += TIMEOUT_S
    one.engine.look_for_late_drafter()
    assert one.engine.drafter_state == ("attached" if answers else "lost")


@pytest.mark.parametrize("how", ["dies", "is detached", "is replaced"])
def test_a_late_drafter_may_go(ref, taps, rigs, how):
    one, end, _, _ = new_rig(rigs, ref, taps)
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    end.silent = {"wait_reply"}
    while one.engine.drafter_state == "attached":
        one.step(run)
    if how == "dies":
        end.alive = False
        one.step(run)
        assert one.engine.drafter_state == "lost"
    elif how == "is detached":
        one.engine.detach_drafter()
        end.silent = set()
        one.step(run)
        assert one.engine.drafter_state == "none"
    else:
        one.replace(ContextDrafter(ref, taps))
        assert one.engine.drafter_state == "attached"
    assert one.finish(run) == [tokens[:SHORT] for tokens in ref.continuations]


def test_another_drafter_is_not_measured_while_streams_would_wait(ref, taps, rigs, monkeypatch):
    one, _, _, _ = new_rig(rigs, ref, taps)
    measured = []
    monkeypatch.setattr(one.engine.policy, "calibrate", lambda end, patience_s: measured.append(end))
    run = Run(one.engine, ref.prompts[:2], greedy_params(SHORT))
    one.step(run)
    one.replace(ContextDrafter(ref, taps))
    assert not measured
    one.finish(run)
    one.replace(ContextDrafter(ref, taps))
    assert len(measured) == 1


class TimedEnd:
    """A verifier end whose waits take a set time of the test's clock, or run into their timeout."""

    def __init__(self, clock):
        self._clock, self.takes_s = clock, 0.0

    def wait_reply(self, round_number, timeout_s, by_device=False):
        self.by_device = by_device
        waited_s = min(self.takes_s, timeout_s)
        self._clock.now += waited_s
        self.takes_s -= waited_s
        return "reply" if self.takes_s <= 0 else None


def test_a_device_waits_in_place_of_the_host_unless_answers_take_long():
    """The times of a slow drafter are measured by the host's waits, which its bound follows."""
    clock = Clock()
    waits, end = DrafterWaits(TIMEOUT_S, on_cpu=False, clock=clock), TimedEnd(clock)
    for takes_s in (0.0, 0.1, *[0.149] * 20):
        end.takes_s, bound_s = takes_s, waits.bound_s
        assert waits.reply(end, 1) == "reply"
        assert end.by_device == (bound_s == LEAST_S)
    assert not end.by_device


def test_the_bound_follows_what_answers_take_late_ones_among_them():
    clock = Clock()
    waits, end = DrafterWaits(TIMEOUT_S, on_cpu=True, clock=clock), TimedEnd(clock)
    assert waits.bound_s == LEAST_S
    num_late = 0
    for _ in range(40):
        end.takes_s = 0.6
        if waits.reply(end, 1) is None:
            num_late += 1
            while not waits.late_reply(end, 1):
                clock.now += 0.05
                end.takes_s -= 0.05
    assert 0 < num_late < 8
    assert 1.1 < waits.bound_s <= 1.2 + 1e-6
    for _ in range(40):
        end.takes_s = 0.01
        assert waits.reply(end, 1) == "reply"
    assert waits.bound_s == LEAST_S


def test_patience_bounds_the_bound_and_is_the_wait_of_whom_nobody_waits_for():
    waits = DrafterWaits(0.05, on_cpu=True)
    assert waits.bound_s == 0.05
    waits = DrafterWaits(TIMEOUT_S, on_cpu=False)
    assert (waits.bound_s, waits.patience_s) == (LEAST_S, FIRST_REPLY_S)
    clock = Clock()
    with waits.unbounded():
        assert waits.bound_s == FIRST_REPLY_S
        waits.reply(TimedEnd(clock), 1)
        assert waits.bound_s == waits.patience_s == TIMEOUT_S
    waits.attached(is_same=False)
    assert waits.patience_s == FIRST_REPLY_S


def test_nothing_of_an_engine_waits_for_a_drafter_but_by_the_bound():
    """Looks for the names of waiting calls in every file of the runtime."""
    root = Path(wingbeat.runtime.__path__[0])
    found = set()
    for file in root.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute))
        if any(node.attr in WAITING for node in calls):
            found.add(str(file.relative_to(root)))
    assert found == {name for name in MAY_WAIT if (root / name).exists()}
