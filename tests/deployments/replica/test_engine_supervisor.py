"""Pauses between the engines of a series of failures, by a clock that only sleeping moves."""

import asyncio

import pytest

from tests.deployments.replica.engine_series import CANNOT_START, NO_PROCESS, World
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.engine_supervisor import PAUSES_S


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
