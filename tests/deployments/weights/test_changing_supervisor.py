"""Engines of another kind, by a clock that only sleeping moves."""

import asyncio

import pytest

from tests.deployments.replica.engine_series import CANNOT_START, LIVES_ON, NO_PROCESS, FakeLife, World
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.weights.changing_supervisor import ChangingSupervisor


@pytest.mark.parametrize("other_s", [61.0, CANNOT_START, NO_PROCESS])
def test_an_engine_of_another_kind_takes_its_place_or_one_as_before_does(other_s: float | None):
    kinds: list[str] = []
    world = World(LIVES_ON, other_s, LIVES_ON, kind=ChangingSupervisor)
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
    world, kinds, asking = World(20.0, LIVES_ON, kind=ChangingSupervisor), [], []
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
