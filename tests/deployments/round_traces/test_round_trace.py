"""A trace holds the rounds between its start and its end, and ends when nobody waits for it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.engine.conftest import ref
from tests.runtime.engine.test_engine_figures import SHORT, engine_of, rig
from tests.runtime.engine.test_told_to_drafter import COUNT, Pair
from tests.runtime.models import TREE, greedy_params
from wingbeat.deployments.round_traces import part, routes
from wingbeat.deployments.round_traces.round_trace import RoundTrace, Traces
from wingbeat.runtime.engine.clocks import RoundClock
from wingbeat.runtime.scheduling.request import Request

__all__ = ["engine_of", "ref", "rig"]


def recorded(clock: RoundClock) -> RoundTrace:
    clock.traces.append(RoundTrace())
    return clock.traces[-1]


def test_a_recording_holds_the_rounds_between_its_ends(ref, rig):
    clock = rig.engine.clock
    rig.run(ref.prompts[:2], greedy_params(SHORT))
    before, trace = clock.times.num_rounds, recorded(clock)
    rig.run(ref.prompts[2:4], greedy_params(SHORT))
    during = clock.times.num_rounds - before
    clock.traces.remove(trace)
    num_events = len(trace.events)
    rig.run(ref.prompts[4:5], greedy_params(SHORT))
    rounds = [event for event in trace.events if event.name == "round"]
    assert (len(rounds), len(trace.events)) == (during, num_events)
    assert sum(event.details["tokens"] for event in rounds) >= 2 * SHORT
    assert sum(event.details["prompt_tokens"] for event in rounds) == sum(map(len, ref.prompts[2:4]))
    ids = {name for event in rounds for name in event.details["requests"]}
    assert len(ids) == 2
    drafted = [event for event in trace.events if event.row == "drafter"]
    assert {"commit", "levels"} <= {event.name for event in drafted}
    assert all(set(event.details["requests"]) <= ids for event in drafted)
    began, ended = rounds[0].start_s - 1.0, rounds[-1].start_s + rounds[-1].seconds + 1.0
    assert all(began < event.start_s < ended for event in drafted), "on the axis of the rounds"
    phases = {event.name for event in trace.events if event.row == "phases"}
    assert phases == {"schedule", "draft_wait", "accept", "publish", "wait", "update"}
    assert all(event.seconds >= 0 for event in trace.events)


def test_two_recordings_of_overlapping_rounds_do_not_disturb_each_other(ref, engine_of):
    engine = engine_of(overlap=True)
    for name in ("a", "b"):
        engine.add_request(Request(name, tuple(ref.prompts[0]), greedy_params(SHORT)))
    first = recorded(engine.clock)
    for _ in range(5):
        engine.step()
    second = recorded(engine.clock)
    for _ in range(5):
        engine.step()
    engine.clock.traces.remove(first)
    while engine.has_unfinished_requests():
        engine.step()
    # The round in flight at the start of a recording is in neither trace.
    counts = [sum(event.name == "round" for event in trace.events) for trace in (first, second)]
    assert counts[0] == 9
    assert counts[1] == engine.clock.times.num_rounds - 5


def test_a_recording_names_the_requests_that_the_drafter_drew_trees_for():
    pair = Pair(TREE)
    trace = recorded(pair.engine.clock)
    passes = pair.run([greedy_params(COUNT), greedy_params(COUNT, speculation=False)])
    rows = [event.details["requests"] for event in trace.events if event.row == "drafter" and event.name == "levels"]
    assert 0 < len(rows) <= len(passes)
    assert all(request_ids == ["0"] for request_ids in rows)


def test_traces_that_nobody_stopped_end_and_hold_nothing_late():
    clock = RoundClock()
    traces = Traces(clock)
    late = traces.start(-1.0)
    with clock.schedule:
        pass
    assert clock.traces[0].events == []
    other = traces.start(60.0)
    assert len(clock.traces) == 1
    with clock.schedule:
        pass
    assert [event[0] for event in traces.stop(other)] == ["schedule"]
    assert clock.traces == []
    with pytest.raises(KeyError):
        traces.stop(late)


def test_a_recording_ends_also_where_nobody_waits_for_it(monkeypatch):
    traces, records = Traces(RoundClock()), []

    class Source:
        async def call(self, engine_id: str, name: str, operation: str, arguments: tuple) -> Any:
            assert (engine_id, name) == ("a", "operate")
            return {"start_trace": traces.start, "stop_trace": traces.stop}[operation](*arguments)

    monkeypatch.setattr(routes, "add_trace_route", lambda app, engine_ids, record: records.append(record))
    part.add_router_routes(None, [SimpleNamespace(pool=SimpleNamespace(engine_ids={"a"}), source=Source())])

    async def scenario() -> None:
        assert await records[0]("a", 0.0) == []
        waits = asyncio.ensure_future(records[0]("a", 60.0))
        await asyncio.sleep(0.01)
        assert len(traces._clock.traces) == 1
        waits.cancel()
        await asyncio.wait([waits])
        await asyncio.sleep(0)
        assert traces._clock.traces == []

    asyncio.run(scenario())
