"""Drafters that GPU memory does not reach: the channel or the drafter moves."""

import asyncio
from functools import partial

import pytest

from tests.deployments.replica.drafters.supervisor_world import FakeDrafter, World
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.gpu_memory.taking_in import TakingInSupervisor, may_take_drafter_in


def supervisor(takes_in: bool = True, problem: str | None = None) -> "partial[TakingInSupervisor]":
    return partial(TakingInSupervisor, takes_in=takes_in, problem=problem)


def test_drafters_that_do_not_reach_the_channel_attach_to_the_one_that_takes_over():
    world = World(1.0, kind=supervisor(takes_in=False))
    world.unreachable, world.other_channel = "channel", "channel.host"

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 0.0))
        await asyncio.wait_for(world.supervisor.run(), 10)

    asyncio.run(main())
    assert world.reasons == ["no peer access"]
    assert set(world.attached_to) == {"channel.host"}
    assert world.supervisor.fell_back


@pytest.mark.parametrize("problem", [None, "no events between processes"])
def test_an_engine_that_has_room_takes_the_drafter_in_that_does_not_reach_it(problem: str | None):
    world = World(kind=supervisor(problem=problem))
    world.unreachable, world.other_channel = "channel", "channel.host"

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 0.0))
        await asyncio.wait_for(world.supervisor.run(), 10)

    asyncio.run(main())
    assert world.taken_in == [problem or "no peer access"]
    assert (world.num_killed, world.num_launched, world.attached_to, world.reasons) == (1, 0, [], [])
    assert world.supervisor.taken_in
    world.supervisor.stop()
    assert world.num_killed == 1, "there is nothing left to end"


def test_an_engine_without_room_for_the_drafter_reaches_another_one_through_host_memory(caplog):
    world = World(1.0, kind=supervisor())
    world.unreachable, world.other_channel, world.engine_is_full = "channel", "channel.host", True

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 0.0))

    asyncio.run(main())
    assert (world.taken_in, world.reasons) == (["no peer access"], ["no peer access"])
    assert (world.num_killed, world.num_launched, world.attached_to) == (1, 1, ["channel.host"])
    assert world.supervisor.fell_back
    assert not world.supervisor.taken_in
    assert "cannot load the drafter itself: no room for it" in caplog.text


def test_a_drafter_that_is_lost_later_is_replaced_and_not_taken_in():
    world = World(30.0, kind=supervisor())

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 1.0))
        world.unreachable = "channel"
        await asyncio.wait_for(world.supervisor.run(), 10)

    world.ends_at = 20.0
    asyncio.run(main())
    assert world.num_launched > 0
    assert world.taken_in == []


@pytest.mark.parametrize(
    ("values", "taken_in"),
    [
        ({"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3}, True),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 1}, False),
        ({"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3, "channel": "shm"}, False),
        ({"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3, "drafter_place": "actor"}, False),
        ({"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3, "drafters": {"num": 1}}, False),
        ({"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3, "engine_factory": "a:b"}, False),
        ({}, False),
    ],
)
def test_an_engine_may_take_its_drafter_in_where_both_share_a_gpu_and_nothing_else_was_named(values, taken_in):
    assert may_take_drafter_in(AppConfig(**values)) == taken_in
