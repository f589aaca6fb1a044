"""Requests under suspicion of having broken a round or an engine run alone, and are forgotten in time."""

from dataclasses import replace

import pytest

from tests.runtime.scheduling_world import make, play, request
from wingbeat.runtime.scheduling import suspects
from wingbeat.runtime.scheduling.request import ALONE_TOKENS


def test_what_engines_died_under_runs_alone_for_a_few_rounds_and_the_others_go_on_after():
    scheduler = make(max_num_batched_tokens=64)
    for name in "ab":
        scheduler.add(request(name, 3, max_tokens=40))
    play(scheduler, scheduler.schedule())
    for name in "cd":
        scheduler.add(replace(request(name, 3, max_tokens=40), alone=True))
    rounds = []
    assert scheduler.num_deferred == 0
    while len(rounds) < 80:
        plan = scheduler.schedule()
        innocent = [seq for seq in scheduler.waiting if seq not in scheduler.suspects]
        assert scheduler.num_deferred == (len(innocent) if scheduler.suspects else 0)
        rounds.append("".join(sorted(seq.request.request_id for seq in scheduler.running)))
        play(scheduler, plan)
    alone = ALONE_TOKENS + 1
    assert rounds[: 2 * alone] == ["c"] * alone + ["d"] * alone
    assert rounds[2 * alone] == "abcd"
    assert not scheduler.running
    assert scheduler.suspects.num_unexplained == 0


def raises_unexplained(scheduler):
    """A round raises, and what ran in it passes alone."""
    scheduler.restart(drafted=False)
    while scheduler.suspects:
        play(scheduler, scheduler.schedule())


def test_rounds_that_raised_long_ago_are_forgotten(monkeypatch):
    """Failures far apart end nobody's engine; as many in a row are the engine's own."""
    monkeypatch.setattr(suspects, "FORGOTTEN_AFTER", 20)
    scheduler = make(max_model_len=512, num_kv_blocks=140)
    scheduler.add(request("a", 2, max_tokens=400))
    play(scheduler, scheduler.schedule())
    for _ in range(suspects.MAX_UNEXPLAINED + 2):
        raises_unexplained(scheduler)
        assert scheduler.suspects.num_unexplained == 1
        for _ in range(20):
            play(scheduler, scheduler.schedule())
        assert scheduler.suspects.num_unexplained == 0
    for _ in range(suspects.MAX_UNEXPLAINED):
        raises_unexplained(scheduler)
    with pytest.raises(RuntimeError, match="ran alone without one"):
        scheduler.restart(drafted=False)
