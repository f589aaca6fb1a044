"""Pauses between the drafters of a series of failures, by a clock that only sleeping moves."""

import asyncio
from collections.abc import Callable

import pytest

from wingbeat.cluster.channels.header import ChannelError, ChannelName
from wingbeat.deployments.replica.drafters.supervisor import POLL_S, DrafterSupervisor
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError
from wingbeat.deployments.replica.engine_client import EngineFailed

CANNOT_START = None


class FakeCalls:
    """An engine that answers at once, until it fails."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.failed = False

    async def call(self, name: str, *arguments: str) -> bool | str | None:
        if self.failed or self.world.time.now > self.world.ends_at:
            raise EngineFailed("over")
        if name == "fall_back":
            self.world.reasons += arguments
            return self.world.other_channel
        if name == "take_drafter_in":
            self.world.taken_in += arguments
            if self.world.engine_is_full:
                raise MemoryError("no room for it")
            return None
        if name == "attach_drafter":
            self.world.num_asked += 1
            return self.world.num_asked > self.world.num_unreached
        return {"drafter_is_lost": self.world.time.now >= self.world.dies_at}[name]


class FakeTime:
    """Sleeping takes no time and moves the clock; the pauses of at least a second are kept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)


class FakeDrafter:
    """Lives for a given time once attached; None cannot start."""

    def __init__(self, world: "World", lives_s: float | None) -> None:
        self.world = world
        self.lives_s = lives_s
        self.num_attached = 0

    async def attach(self, channel_name: str, next_incarnation: Callable[[], int]) -> int:
        if self.lives_s is None:
            raise RuntimeError("cannot start")
        if channel_name == self.world.unreachable:
            raise ChannelError("no peer access")
        self.world.attached_to.append(channel_name)
        self.num_attached += 1
        self.world.incarnations.append(next_incarnation())
        if self.num_attached > 1 and not self.world.connects_again:
            raise RuntimeError("cannot be reached")
        self.world.dies_at = self.world.time.now + self.lives_s
        return 0

    async def renew(self) -> bool:
        if not self.world.renewals:
            return False
        self.lives_s = self.world.renewals.pop(0)
        self.world.num_renewed += 1
        return True

    def kill(self) -> None:
        self.world.num_killed += 1


class World:
    """A supervisor whose successive drafters live for the given times; then the engine fails."""

    def __init__(
        self,
        *lives_s: float | None,
        channel: ChannelName = "channel",
        connects_again: bool = True,
        takes_in: bool = False,
    ) -> None:
        self.time = FakeTime()
        self.connects_again = connects_again
        self.renewals: list[float | None] = []
        """Lives of the processes that a drafter's host can begin after the first one."""
        self.num_renewed = 0
        self.num_asked = self.num_unreached = 0
        """Number of requests to the engine to draft, and number of those at which the drafter's marks were absent."""
        self.ends_at = float("inf")
        self.incarnations: list[int] = []
        self.unreachable, self.other_channel = "", None
        """Reason why no drafter can attach, and the channel that the engine offers instead."""
        self.reasons: list[str] = []
        self.taken_in: list[str] = []
        """Reasons for which the engine was asked to load the drafter itself."""
        self.engine_is_full = False
        self.attached_to: list[str] = []
        self.engine = FakeCalls(self)
        self.dies_at = 0.0
        self.num_killed = self.num_launched = 0
        self.pauses: list[float] = []
        self._lives = list(lives_s)
        self.supervisor = DrafterSupervisor(
            self.engine.call,
            channel,
            self._launch,
            sleep=self.time.sleep,
            clock=self.time.clock,
            takes_in=takes_in,
        )

    def _launch(self) -> FakeDrafter:
        self.num_launched += 1
        # The supervisor's latest sleep since it found the drafter lost is the pause before this launch.
        self.pauses.append(0.0 if self.time.sleeps[-1] == POLL_S else self.time.sleeps[-1])
        if not self._lives:
            self.engine.failed = True
        return FakeDrafter(self, self._lives.pop(0) if self._lives else 1.0)


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


def run_remote(first_lives_s: float, *, connects_again: bool, until_s: float) -> World:
    """A drafter on another node, with connections of the given durations; at the end the engine fails."""
    world = World(60.0, channel=("host", 1), connects_again=connects_again)

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


def test_drafters_that_do_not_reach_the_channel_attach_to_the_one_that_takes_over():
    world = World(1.0)
    world.unreachable, world.other_channel = "channel", "channel.host"

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 0.0))
        await asyncio.wait_for(world.supervisor.run(), 10)

    asyncio.run(main())
    assert world.reasons == ["no peer access"]
    assert set(world.attached_to) == {"channel.host"}
    assert world.supervisor.fell_back


def test_without_another_channel_the_start_says_why_the_first_does_not_do():
    world = World()
    world.unreachable = "channel"
    with pytest.raises(DrafterStartError, match="the drafter cannot start: no peer access"):
        asyncio.run(world.supervisor.start(FakeDrafter(world, 0.0)))


@pytest.mark.parametrize("problem", [None, "no events between processes"])
def test_an_engine_that_has_room_takes_the_drafter_in_that_does_not_reach_it(problem: str | None):
    world = World(takes_in=True)
    world.unreachable, world.other_channel = "channel", "channel.host"

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 0.0), problem)
        await asyncio.wait_for(world.supervisor.run(), 10)

    asyncio.run(main())
    assert world.taken_in == [problem or "no peer access"]
    assert (world.num_killed, world.num_launched, world.attached_to, world.reasons) == (1, 0, [], [])
    assert world.supervisor.taken_in
    world.supervisor.stop()
    assert world.num_killed == 1, "there is nothing left to end"


def test_an_engine_without_room_for_the_drafter_reaches_another_one_through_host_memory(caplog):
    world = World(1.0, takes_in=True)
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
    world = World(30.0, takes_in=True)

    async def main() -> None:
        await world.supervisor.start(FakeDrafter(world, 1.0))
        world.unreachable = "channel"
        await asyncio.wait_for(world.supervisor.run(), 10)

    world.ends_at = 20.0
    asyncio.run(main())
    assert world.num_launched > 0
    assert world.taken_in == []
