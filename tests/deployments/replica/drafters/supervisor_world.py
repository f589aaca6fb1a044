"""Drafters and their supervisor, by a clock that only sleeping moves."""

from collections.abc import Callable

from wingbeat.cluster.channels.header import ChannelError, ChannelName
from wingbeat.deployments.replica.drafters.supervisor import POLL_S, DrafterSupervisor
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
        kind: Callable[..., DrafterSupervisor] = DrafterSupervisor,
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
        self.supervisor = kind(
            self.engine.call,
            channel,
            self._launch,
            sleep=self.time.sleep,
            clock=self.time.clock,
        )

    def _launch(self) -> FakeDrafter:
        self.num_launched += 1
        # The supervisor's latest sleep since it found the drafter lost is the pause before this launch.
        self.pauses.append(0.0 if self.time.sleeps[-1] == POLL_S else self.time.sleeps[-1])
        if not self._lives:
            self.engine.failed = True
        return FakeDrafter(self, self._lives.pop(0) if self._lives else 1.0)
