"""Places that a router has given out, and where requests wait while there is no engine."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 1.0


class CountsPlaces(Protocol):
    """Who gives them out; `wingbeat.deployments.fleet.engine_pool.EnginePool` does."""

    num_admitted: int


class Reservation:
    """Places for requests, in the engines or in the queue before them; taken until they are released."""

    def __init__(self, pool: CountsPlaces, num_requests: int) -> None:
        self._pool = pool
        self._num_left = num_requests

    def release(self, num_requests: int | None = None) -> None:
        """Give back some places, or all that are left; more than are left are not given back."""
        num_requests = self._num_left if num_requests is None else min(num_requests, self._num_left)
        self._num_left -= num_requests
        self._pool.num_admitted -= num_requests


class EngineWait:
    """Where requests wait until an engine may be there, and how one is asked for.

    Args:
        ask: a call that waits for an engine, which is what makes Serve start one.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self.num_waiting = 0
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def until(self, deadline: float, *, ask: bool) -> None:
        """Return when there may be an engine, at the deadline, or after a while, when it is time to ask again.

        Args:
            deadline: on the monotonic clock.
            ask: whether an engine has to be asked for.
        """
        if ask and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._ask_once())
        self._over.clear()
        self.num_waiting += 1
        waiter = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait([waiter], timeout=min(ASK_AGAIN_S, max(0.0, deadline - time.monotonic())))
        finally:
            waiter.cancel()
            self.num_waiting -= 1

    def over(self) -> None:
        """There may be an engine: whoever waits looks again."""
        self._over.set()

    def end(self) -> None:
        """Ask no more; whoever waits looks again."""
        self._over.set()
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_once(self) -> None:
        try:
            await self._ask()
        except Exception as error:
            # Whatever the transport raises; it is asked again as long as a request waits.
            logger.warning("No engine comes: %s: %s", type(error).__name__, error)
