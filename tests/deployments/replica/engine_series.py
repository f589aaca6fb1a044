"""Engines that live for given times, and their supervisor, by a clock that only sleeping moves."""

import asyncio
import math
from types import SimpleNamespace

from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor

CANNOT_START, NO_PROCESS, LIVES_ON = None, -1.0, math.inf


class World:
    """A supervisor whose successive engines live for the given times; the last one lives on."""

    def __init__(self, *lives_s: float | None, kind: type[EngineSupervisor] = EngineSupervisor) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.num_ended = 0
        self._lives = list(lives_s)
        self.supervisor = kind(self._launch, sleep=self._sleep, clock=lambda: self.now)

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
