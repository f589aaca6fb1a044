"""A start says which replica waits for a place, and ends where the place does not come."""

import threading
from types import SimpleNamespace

import pytest

from wingbeat.deployments import launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import ServedApplication, StartError
from wingbeat.deployments.placement_watch import PlacementWatch

UNPLACED = "Deployment has 1 replicas that have taken more than 30s\n to be scheduled. Resources required: [{'CPU': 9}]"


class World:
    """Deployments, a clock, and what the watch does."""

    def __init__(self) -> None:
        self.deployments = {"Router": SimpleNamespace(message=""), "Verifier": SimpleNamespace(message=UNPLACED)}
        self.now, self.said, self.ends = 0.0, [], 0

    def end(self) -> None:
        self.ends += 1

    def watch(self) -> PlacementWatch:
        return PlacementWatch(
            lambda: self.deployments, self.said.append, self.end, limit_s=100.0, clock=lambda: self.now
        )


def test_a_wait_is_said_once_and_ends_the_start_after_the_limit():
    world = World()
    watch = world.watch()
    for world.now in (0.0, 50.0, 100.0):
        watch.look()
    assert len(world.said) == 1
    assert world.said[0].startswith("waiting for Ray to place Verifier: Deployment has 1 replicas")
    assert (watch.problem, world.ends) == (None, 0)
    world.now = 101.0
    watch.look()
    assert world.ends == 1
    assert "no place for Verifier within 100 s" in watch.problem
    assert "\n" not in watch.problem


def test_a_place_that_comes_ends_the_wait():
    world = World()
    watch = world.watch()
    watch.look()
    world.deployments["Verifier"].message = ""
    world.now = 90.0
    watch.look()
    world.deployments["Verifier"].message = UNPLACED
    world.now = 120.0
    watch.look()
    assert (watch.problem, len(world.said)) == (None, 2)


def test_a_start_whose_replica_finds_no_place_is_one_line(fake_ray, monkeypatch: pytest.MonkeyPatch):
    fake, deleted = fake_ray(), threading.Event()
    unplaced = SimpleNamespace(message=UNPLACED, status=SimpleNamespace(value="UPDATING"))

    def run(app: object, name: str) -> None:
        fake.applications[name] = SimpleNamespace(status=None, deployments={"Verifier": unplaced})
        assert deleted.wait(30)
        raise RuntimeError("application doesn't exist")

    monkeypatch.setattr(fake, "run", run)
    monkeypatch.setattr(fake, "delete", lambda name, _blocking=True: deleted.set())
    monkeypatch.setattr(launch, "PlacementWatch", lambda *parts: PlacementWatch(*parts, limit_s=0.0, poll_s=0.01))
    with pytest.raises(StartError, match="Ray has found no place for Verifier"):
        ServedApplication(AppConfig()).start()
