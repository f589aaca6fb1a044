"""Drafters on another node whose connection breaks."""

import asyncio

from tests.deployments.replica.drafters.supervisor_world import FakeDrafter, World
from wingbeat.deployments.two_nodes.reconnecting import ReconnectingSupervisor


def run_remote(first_lives_s: float, *, connects_again: bool, until_s: float) -> World:
    """A drafter on another node, with connections of the given durations; at the end the engine fails."""
    world = World(60.0, channel=("host", 1), connects_again=connects_again, kind=ReconnectingSupervisor)

    world.ends_at = until_s

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, first_lives_s))
        await asyncio.wait_for(world.supervisor.run(), 10)

    asyncio.run(main())
    return world


def test_a_drafter_of_another_node_whose_connection_breaks_is_connected_again():
    world = run_remote(10.0, connects_again=True, until_s=35.0)
    assert world.incarnations == [1, 2, 3, 4]
    assert (world.num_launched, world.num_killed) == (0, 0)


def test_a_drafter_of_another_node_that_cannot_be_reached_is_replaced():
    world = run_remote(10.0, connects_again=False, until_s=12.0)
    assert world.incarnations == [1, 2, 3]
    assert (world.num_launched, world.num_killed) == (1, 1)


def test_a_drafter_whose_connections_break_at_once_is_replaced():
    world = run_remote(0.5, connects_again=True, until_s=2.0)
    assert world.incarnations == [1, 2]
    assert (world.num_launched, world.num_killed) == (1, 1)
