"""Keeps an engine in a replica: starts one, and another one when its process dies, without a new replica."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.engine_client import EngineClient, EngineFailed

logger = logging.getLogger(__name__)
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each new start in a series of failures; after the last one the replica is at its end."""
STABLE_S = 60.0
"""An engine that lasted this long is not part of a series of failures."""


class Life(Protocol):
    """One engine with its drafter; `EngineLife` is the real one."""

    client: EngineClient

    async def start(self) -> None: ...
    async def end(self) -> None: ...


class _Change(NamedTuple):
    """Another kind of engine that is asked for."""

    launch: Callable[[], Life]
    done: "asyncio.Future[None]"


class EngineSupervisor:
    """Owns the engine of one replica.

    Args:
        launch: begins another life; it is started here.
    """

    def __init__(
        self,
        launch: Callable[[], Life],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: EngineFailed | None = None
        """Why there will be no further engine here."""
        self.num_restarts = 0
        self._launch = launch
        self._sleep = sleep
        self._clock = clock
        self._life: Life | None = None
        self._started_at: float | None = None
        self._change: _Change | None = None
        self._changed = asyncio.Event()
        """Set whenever an engine has started, or none will."""

    @property
    def life(self) -> Life | None:
        """The engine that runs, or None while there is none."""
        return self._life if self._started_at is not None and self._life.client.failure is None else None

    @property
    def client(self) -> EngineClient:
        """Raises EngineFailed while no engine runs."""
        if self.life is None:
            raise self.failure or EngineFailed("the engine is gone; another one is being started")
        return self.life.client

    async def ready(self) -> EngineClient:
        """The engine that runs, or the next one. Raises EngineFailed where none will."""
        while self.life is None:
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()
        return self.client

    async def start(self) -> None:
        """Start the first engine.

        Raises:
            Exception: what kept it from starting; one line that says what to change.
        """
        self._life = self._launch()
        await self._life.start()
        self._begin()

    async def run(self) -> None:
        """Replace the engine whenever it dies; returns once that has failed too often.

        The first of a series of failures is answered at once, each further one after a longer pause.
        """
        try:
            await self._run()
        except Exception as error:  # whatever it is: without this there would never be another engine here
            logger.exception("No engine can be kept here")
            self._give_up(f"no engine can be kept here: {root_cause(error)}")

    async def _run(self) -> None:
        num_failures = 0
        while True:
            reason = await self._death()
            if self._change is not None:
                await self._take_change()
                continue
            if self._started_at is not None and self._clock() - self._started_at > STABLE_S:
                num_failures = 0
            self._started_at = None
            if num_failures == len(PAUSES_S):
                return self._give_up(f"{num_failures + 1} engines in a row have died: {reason}")
            pause_s = PAUSES_S[num_failures]
            num_failures += 1
            logger.warning("Lost the engine, the next one starts in %.0f s: %s", pause_s, reason)
            await self._life.end()
            await self._sleep(pause_s)
            await (self._replace() if self._change is None else self._take_change())

    async def change(self, launch: Callable[[], Life]) -> None:
        """End the engine that runs and start one of another kind, of which later ones are too.

        Raises:
            EngineFailed: there will be no further engine here.
            Exception: what kept it from starting; one as before has been tried since, and goes on to be.
        """
        if self.failure is not None:
            raise self.failure
        self._change = change = _Change(launch, asyncio.get_running_loop().create_future())
        await self._life.end()
        await change.done

    async def stop(self) -> None:
        """End the engine; harmless without one and a second time."""
        if self._life is not None:
            await self._life.end()

    async def _take_change(self) -> None:
        (launch, done), self._change = self._change, None
        self._launch, before, self._started_at = launch, self._launch, None
        try:
            await self._life.end()
            self._life = self._launch()
            await self._life.start()
        except Exception as error:
            # Whatever it is: whoever asked for it is told.
            await self._life.end()
            self._launch = before
            await self._replace()
            if not done.done():
                done.set_exception(error)
            return
        self._begin()
        if not done.done():
            done.set_result(None)

    async def _replace(self) -> None:
        self.num_restarts += 1
        try:
            self._life = self._launch()
            await self._life.start()
        except Exception as error:
            # Whatever it is: `_death` finds it, and the next pause is longer.
            logger.warning("The engine cannot start: %s", root_cause(error))
            await self._life.end()
            return
        self._begin()

    def _give_up(self, reason: str) -> None:
        """There will be no further engine here: Serve replaces the replica."""
        self.failure = EngineFailed(reason)
        logger.error("%s", self.failure)
        if self._change is not None and not self._change.done.done():
            self._change.done.set_exception(self.failure)
        self._changed.set()

    def _begin(self) -> None:
        self._started_at = self._clock()
        self._changed.set()

    async def _death(self) -> str:
        client = self._life.client
        await client.lost()
        return str(client.failure)
