"""Keeps a drafter attached to an engine: starts one, and replaces it when its process dies or falls silent."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from wingbeat.cluster.channels.header import ChannelError, ChannelName
from wingbeat.deployments.replica.drafters.back_off import FIRST_S, BackOff
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError
from wingbeat.deployments.replica.engine_client import EngineFailed

logger = logging.getLogger(__name__)
POLL_S = 0.25
FREED_S = 1.0
"""For the driver to take back the memory of a process that was killed."""
RECONNECT_S, RECONNECT_AFTER_S = 5.0, 1.0
"""What a drafter on another node has to attach again; one whose connection broke sooner than that is replaced."""


class DrafterHandle(Protocol):
    """One drafter process, or the place in one that others share."""

    terms: bytes | None
    """What it was told by its verifier, pickled `DrafterTerms`; None before that is settled."""

    async def needs(self, terms: bytes) -> bytes | None:
        """What it needs of its verifier, given what that tells it; both pickled. Raises if it cannot start.

        None where the engine's process is to find that out, because no drafter need be there.
        """
        ...

    async def attach(self, channel_name: ChannelName, next_incarnation: Callable[[], int]) -> int:
        """Make it serve a channel, once it is ready; its process id. Raises if it could not start.

        Args:
            next_incarnation: gives one that none has had, for every attempt.
        """
        ...

    async def renew(self) -> bool:
        """End its process and begin another one in its place; whether that could be done."""
        ...

    def kill(self) -> None:
        """Let go of it without waiting; a drafter that no other verifier shares ends, even one that is stopped."""
        ...


class DrafterSupervisor:
    """Owns the drafter of one engine. Requests go on plainly whenever there is none.

    Args:
        call: runs a method of `EngineCalls`; raises EngineFailed once the engine is gone.
        back_off_s: the first pause in a series of failures, which doubles.
        takes_in: whether the engine may load the drafter itself where the first one does not reach it.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        channel_name: ChannelName,
        launch: Callable[[], DrafterHandle],
        back_off_s: float = FIRST_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        takes_in: bool = False,
    ) -> None:
        self.incarnation = 0
        self.pid = 0
        self.fell_back = False
        """Whether another channel has taken over because a drafter did not reach the first."""
        self.taken_in = False
        """Whether the engine has the drafter in its own process: then there is nothing to replace."""
        self._takes_in = takes_in
        self._call = call
        self._channel_name = channel_name
        self._back_off = BackOff(back_off_s)
        self._launch = launch
        self._sleep = sleep
        self._clock = clock
        self._attached_at: float | None = None
        self._drafter: DrafterHandle | None = None

    async def start(self, drafter: DrafterHandle, problem: str | None = None) -> None:
        """Attach the first drafter, launched ahead of time, or have the engine take it in.

        Args:
            problem: why another channel has taken over, where that is so already.

        Raises:
            DrafterStartError: it cannot start; names the cause.
        """
        try:
            self.fell_back = problem is not None
            if self._takes_in and problem is not None:
                drafter = await self._take_in(drafter, problem)
            if not self.taken_in:
                await self._attach_new(drafter)
        except EngineFailed:
            raise
        except asyncio.CancelledError:
            self._kill()
            raise
        except Exception as error:
            self._kill()
            raise DrafterStartError(f"the drafter cannot start: {root_cause(error)}") from None

    async def run(self) -> None:
        """Replace the drafter whenever it is lost, or connect it again; ends when the engine does.

        One that the engine has taken in lives and dies with it.
        """
        if self.taken_in:
            return
        with contextlib.suppress(EngineFailed):
            while True:
                await self._sleep(POLL_S)
                if not await self._call("drafter_is_lost"):
                    continue
                # None after a failed attempt: the attempt and the pause before it are no part of any drafter's life.
                if self._attached_at is not None:
                    self._back_off.lasted(self._clock() - self._attached_at)
                if await self._reconnected():
                    continue
                await self._renew()
                await self._sleep(self._back_off.take())
                try:
                    await self._attach_new(self._drafter)
                except EngineFailed:
                    raise
                except Exception as error:
                    pause_s = self._back_off.pause_s
                    logger.warning("No drafter, next try in %.0f s: %s", pause_s, root_cause(error))

    def stop(self) -> None:
        """End the drafter."""
        self._kill()

    @property
    def lacks_room(self) -> bool:
        """Whether there is no drafter because those there are hold as many verifiers as they can."""
        return getattr(self._drafter, "lacks_room", False)

    async def _reconnected(self) -> bool:
        """Whether the drafter, of which only the connection has broken, is attached again."""
        held = self._drafter is not None and not isinstance(self._channel_name, str)
        if not held or self._attached_at is None or self._clock() - self._attached_at < RECONNECT_AFTER_S:
            return False
        try:
            await asyncio.wait_for(self._attach(), RECONNECT_S)
        except EngineFailed:
            raise
        except Exception as error:
            logger.info("The drafter is not reached again: %s", root_cause(error))
            return False
        return True

    async def _renew(self) -> None:
        """Give the lost drafter a new process, or let go of it.

        One that never attached is not asked: whatever ails it may be its host's. It stays this object's all the time:
        if the engine ends meanwhile, `stop` ends the drafter, whose place nobody else could have otherwise.
        """
        if self._drafter is not None and not (self._attached_at is not None and await self._drafter.renew()):
            self._kill()

    async def _attach_new(self, drafter: DrafterHandle | None) -> None:
        self._attached_at = None
        self._drafter = drafter or self._launch()
        await self._attach()

    async def _attach(self) -> None:
        self._attached_at = None
        try:
            await self._attach_once()
        except ChannelError as error:
            if self._takes_in:
                self._drafter = await self._take_in(self._drafter, root_cause(error))
                if self.taken_in:
                    return
            other = await self._call("fall_back", root_cause(error))
            if other is None:
                raise
            self._channel_name, self.fell_back = other, True
            await self._attach_once()
        self._takes_in = False
        self._attached_at = self._clock()
        logger.info("Drafter incarnation %d attached, process %d", self.incarnation, self.pid)

    async def _take_in(self, drafter: DrafterHandle, reason: str) -> DrafterHandle | None:
        """Have the engine load the drafter; where it cannot, another drafter's process, which the others replace."""
        self._takes_in = False  # with the first drafter or never: later the engine has no room for it
        self._drafter = drafter
        self._kill()
        await self._sleep(FREED_S)
        try:
            await self._call("take_drafter_in", reason)
        except EngineFailed:
            raise
        except Exception as error:
            logger.warning("The engine cannot load the drafter itself: %s", root_cause(error))
            return self._launch()
        self.taken_in = True
        return None

    async def _attach_once(self) -> None:
        self.pid = await self._drafter.attach(self._channel_name, self._next_incarnation)
        while not await self._call("attach_drafter"):
            await self._sleep(POLL_S)

    def _next_incarnation(self) -> int:
        self.incarnation += 1
        return self.incarnation

    def _kill(self) -> None:
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            drafter.kill()


def root_cause(error: BaseException | str) -> str:
    """The exception at the bottom of an error from another process, on one line.

    Ray wraps the original and prints its traceback; the last line of that names the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\b(?:\w+\.)+(?=\w+(?:Error|Exception)\b)", "", lines[-1]) if lines else type(error).__name__
