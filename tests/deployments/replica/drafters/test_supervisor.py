"""Pauses between the drafters of a series of failures, by a clock that only sleeping moves."""

import asyncio

import pytest

from tests.deployments.replica.drafters.supervisor_world import CANNOT_START, FakeDrafter, World
from wingbeat.deployments.replica.drafters.supervisor import POLL_S
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError


def pauses(*lives_s: float | None) -> list[float]:
    """Pauses before each drafter after the first, which dies as soon as it is looked at."""
    world = World(*lives_s)

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 0.0))
        await asyncio.wait_for(world.supervisor.run(), 10)

    asyncio.run(main())
    assert world.num_killed >= len(lives_s)
    assert world.incarnations == sorted(set(world.incarnations))
    return world.pauses


def test_a_drafter_that_never_starts_is_tried_less_and_less_often_however_long_that_goes_on():
    assert pauses(*[CANNOT_START] * 12) == [0, 1, 2, 4, 8, 16, *[30] * 7]


def test_a_drafter_whose_marks_are_not_there_yet_is_asked_for_again_between_rounds():
    world = World()
    world.num_unreached = 3
    asyncio.run(world.supervisor.start(FakeDrafter(world, 1.0)))
    assert (world.num_asked, world.incarnations) == (4, [1])
    assert world.time.sleeps == [POLL_S] * 3


def test_drafters_that_start_and_die_young_are_one_series_with_those_that_do_not_start():
    assert pauses(CANNOT_START, 20, CANNOT_START, 20, 20, CANNOT_START) == [0, 1, 2, 4, 8, 16, 30]


def test_a_drafter_that_lived_for_a_minute_ends_the_series():
    assert pauses(CANNOT_START, CANNOT_START, CANNOT_START, 61, CANNOT_START) == [0, 1, 2, 4, 0, 1]


def test_a_lost_drafter_gets_a_new_process_of_its_host_and_one_that_cannot_start_there_another_host():
    world = World(30.0)
    world.renewals = [30.0, CANNOT_START, 30.0]

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 30.0))
        await asyncio.wait_for(world.supervisor.run(), 10)

    world.ends_at = 85.0
    asyncio.run(main())
    assert world.num_renewed == 2, "the second one cannot start, and is not asked for a third"
    assert world.num_launched == 1
    assert len(world.incarnations) == 3
    assert world.num_killed == 1


@pytest.mark.parametrize("during", ["renew", "pause"])
def test_where_the_engine_ends_while_its_drafter_is_being_replaced_none_is_left_behind(during: str):
    """A drafter left behind would block the place of the next engine's drafter for ever, unknown to every process."""
    world = World()
    world.renewals = [30.0]
    reached = asyncio.Event()

    async def stand_still(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def main() -> None:
        drafter = FakeDrafter(world, 0.0)
        await world.supervisor.start(drafter)
        if during == "renew":
            drafter.renew = stand_still
        else:
            world.supervisor._back_off.next_pause = lambda: 5.0
            sleep = world.time.sleep
            world.supervisor._sleep = lambda seconds: stand_still() if seconds == 5.0 else sleep(seconds)
        running = asyncio.create_task(world.supervisor.run())
        async with asyncio.timeout(10):
            await reached.wait()
        running.cancel()
        await asyncio.wait([running])
        world.supervisor.stop()

    asyncio.run(main())
    assert world.num_killed == 1


def test_without_another_channel_the_start_says_why_the_first_does_not_do():
    world = World()
    world.unreachable = "channel"
    with pytest.raises(DrafterStartError, match="the drafter cannot start: no peer access"):
        asyncio.run(world.supervisor.start(FakeDrafter(world, 0.0)))
