"""A member of a drafter pool. It starts a drafter, and replaces the drafter when the drafter dies or stops
responding.
"""

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
"""Maximum seconds until a drafter has been placed, has loaded and has answered. After this time another drafter is
started, which Ray may place on another node.
"""
ASK_S = 0.5
"""Seconds between two status calls. A drafter that leaves a call unanswered for longer gets no further verifiers."""
PATIENCE_S = 60.0
"""Seconds of silence after which a drafter counts as stuck, even if no verifier has left the drafter. A drafter is
silent while a status call is unanswered, or while the drafter's thread does not look for rounds. The limit is long
because a drafter may be compiling kernels.
"""


class PoolMember:
    """Keeps one drafter running; a drafter that ends is replaced by a new drafter under the same number.

    Args:
        start: function that starts a drafter.
        complaint_s: seconds of silence after which a drafter counts as stuck if a verifier has just left it.
        back_off_s: pause before the second retry in a series of failures, in seconds; each later pause is twice the
            previous pause.
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
        """Latest status of the drafter; None until the drafter has loaded."""
        self.num_promised = 0
        """Number of verifiers that were directed to the drafter since the latest status."""
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
        """Number of verifiers that the drafter serves or is about to serve."""
        return self.num_promised + (0 if self.status is None else len(self.status.channels))

    @property
    def answers(self) -> bool:
        """Whether the drafter runs and has answered recently."""
        waits_s = 0.0 if self._asked_at is None else self._clock() - self._asked_at
        return self.status is not None and waits_s < 2 * ASK_S

    def blame(self) -> None:
        """Record that a verifier has left the drafter, possibly because the drafter is stuck. A shorter silence than
        before then suffices for the drafter to count as stuck.
        """
        self._blamed = True

    async def run(self) -> None:
        """Keep one drafter running; never returns."""
        while True:
            try:
                lived_s, why = await self._live()
                # If the drafter never answered, its actor or the actor's node may be at fault, so the next drafter gets
                # a new actor.
                keeps_host = lived_s > 0 and await self.drafter.renew()
            except BaseException:
                self._end()
                raise
            self._end(keeps_host)
            self._back_off.lasted(lived_s)
            pause_s = self._back_off.next_pause()
            logger.warning("Drafter %d of the pool %s, the next one starts in %.0f s", self.number, why, pause_s)
            await self._sleep(pause_s)

    async def _live(self) -> tuple[float, str]:
        """Run one drafter until it ends; returns its lifetime in seconds and the reason why it ended."""
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
        # the error comes from Ray or from the drafter's constructor; in either case there is no drafter
        except Exception as error:
            return 0.0 if began is None else self._clock() - began, f"is gone ({root_cause(error)})"

    async def _ask(self, drafter: SharedDrafter) -> DrafterStatus:
        """Request the drafter's status and return it.

        Raises:
            TimeoutError: the drafter has not answered within the time of silence that is allowed.
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
