"""A member of a drafter pool: starts a drafter, and replaces it when it dies or stops responding."""

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
"""Seconds for a drafter to be placed, to load and to answer; then another one is started, which Ray may place
elsewhere.
"""
ASK_S = 0.5
"""Seconds between two status calls; a drafter with a call unanswered for longer gets no further verifiers."""
PATIENCE_S = 60.0
"""Seconds of silence after which a drafter counts as stuck without a complaint by a verifier; it may be compiling
kernels until then.
"""


class PoolMember:
    """A sequence of drafters under one number, one at a time.

    Args:
        start: starts another drafter.
        complaint_s: seconds of silence after which a drafter counts as stuck that a verifier has just left.
        back_off_s: the first pause above 0 in a series of failures, in seconds; later pauses double.
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
        """The drafter that is starting or running."""
        self.status: DrafterStatus | None = None
        """Latest status; None until the drafter has loaded."""
        self.num_promised = 0
        """Verifiers that were directed to the drafter since the latest status."""
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
        """Verifiers that the drafter serves or is about to serve."""
        return self.num_promised + (0 if self.status is None else len(self.status.channels))

    @property
    def answers(self) -> bool:
        """Whether the drafter runs and has answered recently."""
        waits_s = 0.0 if self._asked_at is None else self._clock() - self._asked_at
        return self.status is not None and waits_s < 2 * ASK_S

    def blame(self) -> None:
        """Report that a verifier has left, which shortens the limit of silence: the drafter may be stuck."""
        self._blamed = True

    async def run(self) -> None:
        """Keep one drafter running; never returns."""
        while True:
            try:
                lived_s, why = await self._live()
                # A drafter that never answered gets a new actor, because the old actor or its node may be at fault.
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
        """Run one drafter to its end. Returns its lifetime in seconds and the reason of the end."""
        began: float | None = None
        try:
            if self.drafter is None:
                self.drafter = self._start()
            self.num_started += 1
            async with asyncio.timeout(APPEARS_S):
                status = await self.drafter.status()
            began = self._clock()
            logger.info("Drafter %d of the pool is running, process %d", self.number, status.process.pid)
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
        except Exception as error:  # any exception from Ray or from the drafter's constructor: there is no drafter
            return 0.0 if began is None else self._clock() - began, f"is gone ({root_cause(error)})"

    async def _ask(self, drafter: SharedDrafter) -> DrafterStatus:
        """The drafter's status.

        Raises:
            TimeoutError: no answer within the limit of silence.
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
