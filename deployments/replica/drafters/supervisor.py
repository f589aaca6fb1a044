"""Keeps a drafter attached to an engine: starts the drafter, and replaces it when its process dies or hangs."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.replica.drafters.back_off import FIRST_S, BackOff
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError
from wingbeat.deployments.replica.engine_client import EngineFailed

logger = logging.getLogger(__name__)
POLL_S = 0.25


class DrafterHandle(Protocol):
    """A drafter process, or one verifier's share of a drafter process."""

    terms: bytes | None
    """Pickled `DrafterTerms` of the verifier; None until the verifier has sent them."""

    async def needs(self, terms: bytes) -> bytes | None:
        """Return pickled `DrafterNeeds` for pickled `DrafterTerms`; raises if the drafter cannot start.

        Returns None if it is possible that no drafter is running yet; the engine's process then determines the needs
        itself.
        """
        ...

    async def attach(self, channel_name: ChannelName, next_incarnation: Callable[[], int]) -> int:
        """Wait until the drafter is loaded, attach it to a channel, and return the drafter's process id; raises if the
        drafter could not start.

        Args:
            next_incarnation: function that returns an unused incarnation number; called once per attempt.
        """
        ...

    async def renew(self) -> bool:
        """End the drafter's process and start a new process in its place; returns whether that succeeded."""
        ...

    def kill(self) -> None:
        """Release the drafter without waiting.

        A drafter that serves no other verifier is killed, which works even if its process was stopped by SIGSTOP.
        """
        ...


class DrafterSupervisor:
    """Owns the drafter of one engine. While no drafter is attached, the engine decodes without drafts.

    Args:
        call: runs a method of `EngineCalls`; raises EngineFailed once the engine is gone.
        back_off_s: pause before the second retry in a series of failures, in seconds; each later pause is twice the
            previous pause.
    """

    fell_back = False
    """Whether the channel is in host memory because the channel in GPU memory did not work."""
    taken_in = False
    """Whether the engine runs the drafter in the engine's process, so that there is no drafter process to replace."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        channel_name: ChannelName,
        launch: Callable[[], DrafterHandle],
        back_off_s: float = FIRST_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.incarnation = 0
        self.pid = 0
        self._call = call
        self._channel_name = channel_name
        self._back_off = BackOff(back_off_s)
        self._launch = launch
        self._sleep = sleep
        self._clock = clock
        self._attached_at: float | None = None
        self._drafter: DrafterHandle | None = None

    async def start(self, drafter: DrafterHandle) -> None:
        """Attach the first drafter, which was launched before this call.

        Raises:
            DrafterStartError: the drafter cannot start; the message names the cause.
        """
        try:
            await self._attach_first(drafter)
        except EngineFailed:
            raise
        except asyncio.CancelledError:
            self._kill()
            raise
        except Exception as error:
            self._kill()
            raise DrafterStartError(f"the drafter cannot start: {root_cause(error)}") from None

    async def run(self) -> None:
        """Replace or reconnect the drafter whenever the drafter is lost; returns when the engine ends."""
        with contextlib.suppress(EngineFailed):
            while True:
                await self._sleep(POLL_S)
                if not await self._call("drafter_is_lost"):
                    continue
                # `_attached_at` is None after a failed attempt: no drafter was attached, so neither the attempt nor the
                # pause before it counts as a drafter's lifetime.
                if self._attached_at is not None:
                    self._back_off.lasted(self._clock() - self._attached_at)
                if await self._reconnected():
                    continue
                await self._renew()
                await self._sleep(self._back_off.next_pause())
                try:
                    await self._attach_new(self._drafter)
                except EngineFailed:
                    raise
                except Exception as error:
                    pause_s = self._back_off.pause_s
                    logger.warning("No drafter, next try in %.0f s: %s", pause_s, root_cause(error))

    def stop(self) -> None:
        """Release the drafter; see `DrafterHandle.kill`."""
        self._kill()

    @property
    def lacks_room(self) -> bool:
        """Whether no drafter is attached because every running shared drafter already serves as many verifiers as it
        can.
        """
        return getattr(self._drafter, "lacks_room", False)

    async def _reconnected(self) -> bool:
        """If the drafter has only lost its connection, attach it again; returns whether it is attached."""
        return False

    async def _renew(self) -> None:
        """Give the lost drafter a new process, or release it.

        A drafter that never attached is released, because its actor or node may be at fault. `self._drafter` stays set
        during the call, so that `stop` can end the drafter and free its resources if the engine ends meanwhile.
        """
        if self._drafter is not None and not (self._attached_at is not None and await self._drafter.renew()):
            self._kill()

    async def _attach_first(self, drafter: DrafterHandle) -> None:
        await self._attach_new(drafter)

    async def _attach_new(self, drafter: DrafterHandle | None) -> None:
        self._attached_at = None
        self._drafter = drafter or self._launch()
        await self._attach()

    async def _attach(self) -> None:
        self._attached_at = None
        await self._attach_once()
        self._attached_at = self._clock()
        logger.info("Drafter incarnation %d attached, process %d", self.incarnation, self.pid)

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
    """Return one line that names the innermost exception of an error from another process.

    Ray wraps the original error in another error and appends the original traceback, whose last line names the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\b(?:\w+\.)+(?=\w+(?:Error|Exception)\b)", "", lines[-1]) if lines else type(error).__name__
