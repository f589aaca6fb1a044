"""Stages within a captured pass are timed by events of the graph, and a drafter's device time is divided by them."""

import pytest
import torch

from tests.runtime.drafters.test_eagle_stages import a_round, new_drafter, new_world
from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import CHAIN, TREE
from wingbeat.runtime.drafters import draft_stages
from wingbeat.runtime.drafters.worker import PassWatch
from wingbeat.runtime.engine.clocks import RoundClock
from wingbeat.runtime.graphs.marks import Marks, events_of
from wingbeat.runtime.protocol.messages import DRAFT_PARTS

LEVEL_S, COMMIT_S, TREES_S = 0.25, 0.5, 0.125


class Event:
    """Recorded in a capture, it has the time at which a replay comes to it, as the names of the marks say."""

    pending = False
    clock = 0.0

    def record(self):
        self.at = Event.clock

    def query(self):
        return not Event.pending

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def timed(monkeypatch):
    """Graphs on this machine hold events, between which a commit, a level and the rest take fixed times."""
    add = Marks.add

    def add_later(marks, name, event):
        Event.clock += {"begin": 7.0, "commit": COMMIT_S, "trees": TREES_S}.get(name, LEVEL_S)
        add(marks, name, event)

    monkeypatch.setattr(Marks, "add", add_later)
    monkeypatch.setattr(draft_stages, "events_of", lambda device: Event)
    monkeypatch.setattr(Event, "pending", False)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@torch.inference_mode()
def test_every_level_of_a_captured_draft_is_timed(timed, shape):
    drafter = new_drafter(shape, FakeDevice())
    world = new_world(drafter)
    world.feed(drafter)
    levels = [str(level) for level in range(1, shape.max_path)]
    for depth in (None, 2, None):
        drafter.draft(a_round(world, world.slots[:2], depth))
    # The latest replay of a graph is read before its next one: here that of all levels, once.
    expected = dict.fromkeys(levels, LEVEL_S) | {"commit": COMMIT_S, "trees": TREES_S}
    assert drafter.stage_s == pytest.approx(expected)
    Event.pending = True
    drafter.draft(a_round(world, world.slots[:2], None))
    assert drafter.stage_s == pytest.approx(expected), "a replay that has not finished is left out"


@torch.inference_mode()
def test_the_time_of_passes_is_divided_in_the_ratio_of_their_parts(timed):
    drafter = new_drafter(CHAIN, FakeDevice())
    world, watch, clock = new_world(drafter), PassWatch(drafter), RoundClock()
    world.feed(drafter)
    for _ in range(4):
        watch.begin()
        drafter.draft(a_round(world, world.slots[:2], None))
        watch.drafted()
        clock.drafted(watch.figures(), list)
    told = clock.draft_s
    levels = DRAFT_PARTS[: CHAIN.max_path - 1]
    assert set(told) == {"draft_commit", "draft_levels", "draft_trees", *levels}
    assert told["draft_commit"] > 0
    for level in levels:
        assert told[level] == pytest.approx(told["draft_level_1"], abs=1e-5)
    assert told["draft_level_1"] == pytest.approx(2 * told["draft_trees"], rel=0.1, abs=1e-5)
    assert sum(told[part] for part in (*levels, "draft_trees")) <= told["draft_levels"] + 1e-5


def test_a_machine_without_such_events_times_passes_whole():
    assert events_of(FakeDevice()) is None
    drafter = new_drafter(CHAIN, FakeDevice())
    world = new_world(drafter)
    with torch.inference_mode():
        world.feed(drafter)
        for _ in range(2):
            drafter.draft(a_round(world, world.slots[:2], None))
    assert drafter.stage_s == {}
