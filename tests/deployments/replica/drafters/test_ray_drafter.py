"""Behaviour of a replica whose drafter's actor does not answer, with fakes in Ray's place."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters import ray_drafter
from wingbeat.deployments.replica.drafters.ray_drafter import RayDrafter
from wingbeat.deployments.replica.engine.engine_messages import NEEDS_ATTEMPTS
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError


class Actors:
    """In place of Ray: the actors that were started, of which the first ones never answer."""

    def __init__(self, num_silent: int) -> None:
        self.num_silent = num_silent
        self.started: list[Any] = []
        self.killed: list[Any] = []

    def start(self, terms: bytes | None) -> Any:
        number = len(self.started)
        actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *arguments: self._answer(number, arguments)))
        self.started.append(actor)
        return actor

    async def _answer(self, number: int, arguments: tuple) -> Any:
        if number < self.num_silent:
            await asyncio.Event().wait()
        return b"needs" if arguments[0] == "needs" else 17


@pytest.fixture
def drafter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[RayDrafter, Actors]:
    actors = Actors(request.param)
    monkeypatch.setattr(ray_drafter, "LATE_S", 0.1)
    monkeypatch.setattr(RayDrafter, "_start", lambda self, terms: actors.start(terms))
    monkeypatch.setattr(ray_drafter.ray, "kill", lambda actor, no_restart: actors.killed.append(actor))
    return RayDrafter(AppConfig(drafter_start_timeout_s=0.1), None), actors


@pytest.mark.parametrize("drafter", [1], indirect=True)
def test_a_drafter_that_does_not_say_what_it_needs_is_replaced_by_one_that_does(drafter: tuple[RayDrafter, Actors]):
    one, actors = drafter
    assert asyncio.run(asyncio.wait_for(one.needs(b"terms"), 10)) == b"needs"
    assert actors.killed == actors.started[:1]
    assert len(actors.started) == 2


@pytest.mark.parametrize("drafter", [9], indirect=True)
def test_where_none_says_it_the_engine_is_told(drafter: tuple[RayDrafter, Actors]):
    one, actors = drafter
    with pytest.raises(DrafterStartError, match="have not said what they need"):
        asyncio.run(asyncio.wait_for(one.needs(b"terms"), 10))
    assert len(actors.killed) == NEEDS_ATTEMPTS
