"""Pauses between the engines of a series of failures, by a clock that only sleeping moves."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.engine_supervisor import PAUSES_S, EngineSupervisor

CANNOT_START, NO_PROCESS, LIVES_ON = None, -1.0, math.inf


class World:
    """A supervisor whose successive engines live for the given times; the last one lives on."""

    def __init__(self, *lives_s: float | None) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.num_ended = 0
        self._lives = list(lives_s)
        self.supervisor = EngineSupervisor(self._launch, sleep=self._sleep, clock=lambda: self.now)

    def _launch(self) -> "FakeLife":
        life = FakeLife(self)
        if life.life_s is NO_PROCESS:
            raise BlockingIOError("no process can be had")
        return life

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def next_life_s(self) -> float | None:
        return self._lives.pop(0)


class FakeLife:
    """As `EngineLife`: its client is lost when its time is over."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.life_s = world.next_life_s()
        self.client = SimpleNamespace(failure=None, lost=self._lost)
        self._ended = asyncio.Event()

    async def start(self) -> None:
        if self.life_s is CANNOT_START:
            raise ValueError("cannot start")

    async def end(self) -> None:
        self._world.num_ended += 1
        self._ended.set()
        self.client.failure = self.client.failure or EngineFailed("ended")

    async def _lost(self) -> None:
        if self.life_s == LIVES_ON:
            await self._ended.wait()
        elif self.life_s is not CANNOT_START:
            self._world.now += self.life_s
        self.client.failure = self.client.failure or EngineFailed("died")


def ended(*lives_s: float | None) -> World:
    """A world in which there will be no further engine."""
    world = World(*lives_s)

    async def main() -> None:
        await world.supervisor.start()
        await asyncio.wait_for(world.supervisor.run(), 10)
        with pytest.raises(EngineFailed, match="in a row have died"):
            await world.supervisor.ready()

    asyncio.run(main())
    return world


@pytest.mark.parametrize("life_s", [20.0, CANNOT_START, NO_PROCESS])
def test_engines_that_die_young_or_never_start_are_tried_less_and_less_often_and_then_no_more(life_s: float | None):
    world = ended(20.0, *[life_s] * len(PAUSES_S))
    assert tuple(world.pauses) == PAUSES_S == tuple(sorted(PAUSES_S))
    assert world.num_ended >= len(PAUSES_S)


def test_an_engine_that_lived_for_a_minute_ends_the_series():
    world = ended(20.0, CANNOT_START, 61.0, *[20.0] * len(PAUSES_S))
    assert tuple(world.pauses) == (*PAUSES_S[:2], *PAUSES_S)


def test_a_first_engine_that_cannot_start_is_the_start_error():
    with pytest.raises(ValueError, match="cannot start"):
        asyncio.run(World(CANNOT_START).supervisor.start())


@pytest.mark.parametrize("other_s", [61.0, CANNOT_START, NO_PROCESS])
def test_an_engine_of_another_kind_takes_its_place_or_one_as_before_does(other_s: float | None):
    kinds: list[str] = []
    world = World(LIVES_ON, other_s, LIVES_ON)
    before = world.supervisor._launch

    def launch(kind: str) -> "FakeLife":
        kinds.append(kind)
        return before()

    world.supervisor._launch = lambda: launch("as before")

    async def main() -> None:
        supervisor = world.supervisor
        await supervisor.start()
        running = asyncio.create_task(supervisor.run())
        changing = supervisor.change(lambda: launch("other"))
        if other_s == 61.0:
            await asyncio.wait_for(changing, 10)
            while len(kinds) < 3:  # it dies, and the next one is of its kind
                await asyncio.sleep(0)
        else:
            with pytest.raises((ValueError, BlockingIOError)):
                await asyncio.wait_for(changing, 10)
        await supervisor.ready()
        running.cancel()

    asyncio.run(main())
    assert kinds == ["as before", "other", "other" if other_s == 61.0 else "as before"]
    assert world.pauses == ([0.0] if other_s == 61.0 else []), "what is asked for is no failure"


@pytest.mark.parametrize("breaks", [False, True], ids=["then starts", "then none can be kept"])
def test_an_engine_of_another_kind_that_is_asked_for_between_two_is_the_next_one_or_is_given_up(breaks: bool):
    world, kinds, asking = World(20.0, LIVES_ON), [], []
    before = world.supervisor._launch

    def other() -> "FakeLife":
        kinds.append("other")
        return before()

    async def asks(seconds: float) -> None:
        asking.append(asyncio.create_task(world.supervisor.change(other)))
        await asyncio.sleep(0)
        if breaks:
            raise ZeroDivisionError("a mistake")

    async def main() -> None:
        world.supervisor._sleep = asks
        await world.supervisor.start()
        running = asyncio.create_task(world.supervisor.run())
        while not asking:
            await asyncio.sleep(0)
        if breaks:
            with pytest.raises(EngineFailed, match="a mistake"):
                await asyncio.wait_for(asking[0], 10)
            with pytest.raises(EngineFailed, match="a mistake"):
                await world.supervisor.change(other)
        else:
            await asyncio.wait_for(asking[0], 10)
            await world.supervisor.ready()
        running.cancel()

    asyncio.run(main())
    assert kinds == ([] if breaks else ["other"])


def test_what_nobody_thought_of_ends_the_replica_rather_than_leaving_it_without_an_engine():
    world = World(20.0)

    async def breaks(seconds: float) -> None:
        raise ZeroDivisionError("a mistake")

    async def main() -> None:
        world.supervisor._sleep = breaks
        await world.supervisor.start()
        await asyncio.wait_for(world.supervisor.run(), 10)
        with pytest.raises(EngineFailed, match="a mistake"):
            await world.supervisor.ready()

    asyncio.run(main())
