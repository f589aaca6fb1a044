"""One member of a pool of drafters: starts a drafter, and another one when it dies or falls silent."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from wingbeat.deployments.replica.drafters.back_off import FIRST_S, BackOff
from wingbeat.deployments.replica.drafters.drafter_messages import DrafterStatus
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.shared_drafters.shared_drafter import SharedDrafter

logger = logging.getLogger(__name__)
APPEARS_S = 900.0
"""For a drafter to be placed, to load and to answer; another one may then find room where this one did not."""
ASK_S = 0.5
"""Between two looks at a drafter; one that has not answered the last one gets no further verifier."""
PATIENCE_S = 60.0
"""Silence after which a drafter of which no verifier complains is stuck: it may be compiling its kernels."""


class PoolMember:
    """One drafter after the other, under one number.

    Args:
        start: has another one started.
        complaint_s: silence after which a drafter is stuck that a verifier has just left.
        back_off_s: the first pause in a series of failures, which doubles.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[], SharedDrafter],
        complaint_s: float,
        back_off_s: float = FIRST_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self.drafter: SharedDrafter | None = None
        """The one that starts or runs."""
        self.status: DrafterStatus | None = None
        """What it said last; None while it has not loaded."""
        self.num_promised = 0
        """Verifiers that have been sent to it since."""
        self.num_started = 0
        self._start = start
        self._complaint_s = complaint_s
        self._back_off = BackOff(back_off_s)
        self._sleep = sleep
        self._clock = clock
        self._asked_at: float | None = None
        self._blamed = False

    @property
    def num_verifiers(self) -> int:
        """Verifiers that it has or is about to get."""
        return self.num_promised + (0 if self.status is None else len(self.status.channels))

    @property
    def answers(self) -> bool:
        """Whether it is there and has answered lately."""
        waits_s = 0.0 if self._asked_at is None else self._clock() - self._asked_at
        return self.status is not None and waits_s < 2 * ASK_S

    def blame(self) -> None:
        """A verifier has left it, maybe because it is silent: it is to answer soon."""
        self._blamed = True

    async def run(self) -> None:
        """Keep one drafter; never returns."""
        while True:
            try:
                lived_s, why = await self._live()
                # One that never answered is not asked: whatever ails it may be its host's.
                keeps_host = lived_s > 0 and await self.drafter.renew()
            except BaseException:
                self._end()
                raise
            self._end(keeps_host)
            self._back_off.lasted(lived_s)
            pause_s = self._back_off.take()
            logger.warning("Drafter %d of the pool %s, the next one starts in %.0f s", self.number, why, pause_s)
            await self._sleep(pause_s)

    async def _live(self) -> tuple[float, str]:
        """One drafter from its start to its end: how long it was there, and what became of it."""
        began: float | None = None
        try:
            if self.drafter is None:
                self.drafter = self._start()
            self.num_started += 1
            async with asyncio.timeout(APPEARS_S):
                status = await self.drafter.status()
            began = self._clock()
            logger.info("Drafter %d of the pool is there, process %d", self.number, status.process.pid)
            while True:
                self.status, self.num_promised = status, 0
                if status.silent_s < self._complaint_s:
                    self._blamed = False
                elif self._blamed or status.silent_s > PATIENCE_S:
                    return self._clock() - began, "is stuck"
                await self._sleep(ASK_S)
                status = await self._ask(self.drafter)
        except TimeoutError:
            return (0.0, "does not start") if began is None else (self._clock() - began, "is silent")
        except Exception as error:  # whatever Ray or its constructor raises: there is no drafter
            return 0.0 if began is None else self._clock() - began, f"is gone ({root_cause(error)})"

    async def _ask(self, drafter: SharedDrafter) -> DrafterStatus:
        """Its status.

        Raises:
            TimeoutError: it takes longer than a drafter may.
        """
        self._asked_at = self._clock()
        asking = asyncio.ensure_future(drafter.status())
        try:
            while True:
                done, _ = await asyncio.wait({asking}, timeout=ASK_S)
                if done:
                    return asking.result()
                if self._clock() - self._asked_at > (self._complaint_s if self._blamed else PATIENCE_S):
                    raise TimeoutError
        finally:
            asking.cancel()
            self._asked_at = None

    def _end(self, keeps_host: bool = False) -> None:
        process = None if self.status is None else self.status.process
        self.status, self.num_promised, self._blamed = None, 0, False
        if keeps_host:
            return
        drafter, self.drafter = self.drafter, None
        if drafter is not None:
            drafter.kill(process)
