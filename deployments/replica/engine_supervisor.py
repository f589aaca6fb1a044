"""Keeps an engine running in a replica: when the engine's process dies, another engine starts in the same replica."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.engine_client import EngineClient, EngineFailed

logger = logging.getLogger(__name__)
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Pauses in seconds before the successive restarts in a series of failures. If the start after the last pause fails
too, the replica gives up.
"""
STABLE_S = 60.0
"""Seconds after which an engine counts as stable: if it dies later than that, its death begins a new series of
failures.
"""


class Life(Protocol):
    """Interface to the lifetime of one engine with its drafter; `EngineLife` implements it."""

    client: EngineClient

    async def start(self) -> None: ...
    async def end(self) -> None: ...


class EngineSupervisor:
    """Owns the engine of one replica.

    Args:
        launch: creates the `Life` of the next engine; this class starts it.
    """

    def __init__(
        self,
        launch: Callable[[], Life],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: EngineFailed | None = None
        """Why no further engine will start in this replica; None as long as lost engines are replaced."""
        self.num_restarts = 0
        self._launch = launch
        self._sleep = sleep
        self._clock = clock
        self._life: Life | None = None
        self._started_at: float | None = None
        self._changed = asyncio.Event()
        """Set whenever an engine has started, and when no further engine will start."""

    @property
    def life(self) -> Life | None:
        """The `Life` of the running engine; None if no engine runs."""
        return self._life if self._started_at is not None and self._life.client.failure is None else None

    @property
    def client(self) -> EngineClient:
        """The client of the running engine; raises EngineFailed while no engine runs."""
        if self.life is None:
            raise self.failure or EngineFailed("the engine is gone; another one is being started")
        return self.life.client

    async def ready(self) -> EngineClient:
        """Wait until an engine runs and return its client; raises EngineFailed if no further engine will start."""
        while self.life is None:
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()
        return self.client

    async def start(self) -> None:
        """Start the first engine.

        Raises:
            Exception: the error that prevented the start; the message is one line that names what to change.
        """
        self._life = self._launch()
        await self._life.start()
        self._begin()

    async def run(self) -> None:
        """Replace the engine whenever it dies; returns once replacements have failed too often in a row.

        The first restart in a series of failures is immediate; before each further restart the pause is longer
        (`PAUSES_S`).
        """
        try:
            await self._run()
        except Exception as error:  # any exception, because without this handler no engine would ever start here again
            logger.exception("No engine can be kept running here")
            self._give_up(f"no engine can be kept running here: {root_cause(error)}")

    async def _run(self) -> None:
        num_failures = 0
        while True:
            reason = await self._death()
            if await self._took_change():
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
            if not await self._took_change():
                await self._replace()

    async def stop(self) -> None:
        """End the engine if there is one; a second call does nothing."""
        if self._life is not None:
            await self._life.end()

    async def _took_change(self) -> bool:
        """Start an engine of another kind if one was requested; returns whether one was. Overridden by subclasses."""
        return False

    async def _replace(self) -> None:
        self.num_restarts += 1
        try:
            self._life = self._launch()
            await self._life.start()
        except Exception as error:
            # Any exception is caught here. `_death` then returns the reason, and the pause before the next start is
            # longer.
            logger.warning("The engine cannot start: %s", root_cause(error))
            await self._life.end()
            return
        self._begin()

    def _give_up(self, reason: str) -> None:
        """Start no further engine. `check_health` fails from now on, so that Serve replaces the replica."""
        self.failure = EngineFailed(reason)
        logger.error("%s", self.failure)
        self._changed.set()

    def _begin(self) -> None:
        self._started_at = self._clock()
        self._changed.set()

    async def _death(self) -> str:
        client = self._life.client
        await client.lost()
        return str(client.failure)
