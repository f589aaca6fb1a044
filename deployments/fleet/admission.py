"""Reserves places for requests, either in engines or in the queue, and lets requests wait while there is no engine."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 1.0
"""Seconds after which a waiting request checks again whether there is an engine."""


class CountsPlaces(Protocol):
    """Counter of reserved places; implemented by `wingbeat.deployments.fleet.engine_pool.EnginePool`."""

    num_admitted: int


class Reservation:
    """A number of reserved places for requests; the places stay reserved until `release` is called."""

    def __init__(self, pool: CountsPlaces, num_requests: int) -> None:
        self._pool = pool
        self._num_left = num_requests

    def release(self, num_requests: int | None = None) -> None:
        """Releases `num_requests` of the places that are still reserved; None releases all of them."""
        num_requests = self._num_left if num_requests is None else min(num_requests, self._num_left)
        self._num_left -= num_requests
        self._pool.num_admitted -= num_requests


class EngineWait:
    """Lets requests wait for an engine, and makes Serve start an engine.

    Args:
        ask: makes a call to any engine. While such a call waits for an engine, Serve's autoscaling starts an engine.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self.num_waiting = 0
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def until(self, deadline: float, *, ask: bool) -> None:
        """Waits until there may be an engine, until the deadline, or for `ASK_AGAIN_S`, whichever comes first.

        Args:
            deadline: time on the monotonic clock.
            ask: whether to make Serve start an engine.
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
        """Wakes all waiting requests, because there may be an engine."""
        self._over.set()

    def end(self) -> None:
        """Cancels the call that waits for an engine, and wakes all waiting requests."""
        self._over.set()
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_once(self) -> None:
        try:
            await self._ask()
        except Exception as error:
            # Any exception is caught, because the transport may raise any exception. The call is repeated as long as a
            # request waits.
            logger.warning("No engine has started: %s: %s", type(error).__name__, error)
