"""A start reports the replica that waits for a place, and ends if no place comes or a replica is refused."""

from types import SimpleNamespace

import pytest
from ray.serve.schema import ApplicationStatus

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.deployments import launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import ServedApplication, StartError
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError
from wingbeat.deployments.replica.refused_start import RefusedStartError, refusal, refusals
from wingbeat.deployments.start_watch import StartWatch

UNPLACED = "Deployment has 1 replicas that have taken more than 30s\n to be scheduled. Resources required: [{'CPU': 9}]"
REFUSED = (
    "A replica failed to start with exception. Retrying 1 more time(s). Error:\nTraceback (most recent call last):\n"
    "wingbeat.deployments.replica.refused_start.RefusedStartError: /m: no tokenizer in /m: there is none\n"
)


class World:
    """Deployments, a clock, and the lines of the watch."""

    def __init__(self) -> None:
        self.deployments = {"Router": SimpleNamespace(message=""), "Verifier": SimpleNamespace(message=UNPLACED)}
        self.now, self.said = 0.0, []
        self.watch = StartWatch(self.said.append, limit_s=100.0, clock=lambda: self.now)

    def look(self, now: float) -> str | None:
        self.now = now
        return self.watch.look(self.deployments)


def test_a_wait_is_said_once_and_ends_the_start_after_the_limit():
    world = World()
    assert [world.look(now) for now in (0.0, 50.0, 100.0)] == [None] * 3
    assert len(world.said) == 1
    assert world.said[0].startswith("waiting for Ray to place Verifier: Deployment has 1 replicas")
    problem = world.look(101.0)
    assert "no place for Verifier after 100 s" in problem
    assert "\n" not in problem


def test_a_place_that_comes_ends_the_wait():
    world = World()
    world.look(0.0)
    world.deployments["Verifier"].message = ""
    world.look(90.0)
    world.deployments["Verifier"].message = UNPLACED
    assert world.look(120.0) is None
    assert len(world.said) == 2


def test_a_refusal_is_final_and_anything_else_is_tried_again():
    world = World()
    world.deployments["Verifier"].message = REFUSED
    assert world.look(0.0) == "/m: no tokenizer in /m: there is none"
    world.deployments["Verifier"].message = REFUSED.replace("RefusedStartError", "EngineFailed")
    assert world.look(1.0) is None


@pytest.mark.parametrize(
    "error", [ValueError("a\nb"), FileNotFoundError("a b"), ChannelError("a b"), DrafterStartError("a b")], ids=repr
)
def test_errors_of_settings_and_files_are_refusals(error: Exception):
    with pytest.raises(RefusedStartError) as refused, refusals():
        raise error
    name = f"{type(refused.value).__module__}.{type(refused.value).__name__}"
    assert refusal(f"Error:\n{name}: {refused.value}") == "a b"
    with pytest.raises(RuntimeError, match="lost"), refusals():
        raise RuntimeError("lost")


@pytest.mark.parametrize(
    ("message", "says"), [(UNPLACED, "Ray has no place for Verifier"), (REFUSED, "no tokenizer in /m")]
)
def test_a_start_in_vain_is_one_line(fake_ray, monkeypatch: pytest.MonkeyPatch, message: str, says: str):
    fake = fake_ray()
    verifier = SimpleNamespace(message=message, status=SimpleNamespace(value="UPDATING"))

    def run(app: object, name: str) -> None:
        deploying = SimpleNamespace(status=ApplicationStatus.DEPLOYING, deployments={"Verifier": verifier})
        fake.applications[name] = deploying

    monkeypatch.setattr(fake, "run", run)
    monkeypatch.setattr(launch, "StartWatch", lambda say: StartWatch(say, limit_s=0.0))
    with pytest.raises(StartError, match=says):
        ServedApplication(AppConfig()).start()
