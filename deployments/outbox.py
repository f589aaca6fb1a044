"""Outputs on their way from the engine's thread to one router: conflated while the router is behind."""

import asyncio
import threading

from wingbeat.deployments.wire import WireOutput, merge, pack_output, pack_refusal
from wingbeat.runtime.request import RequestOutput


class ClientGone(Exception):
    """The client is not connected, or its connection was closed."""


class Outbox:
    """Filled by the engine's thread, taken by one consumer on the event loop that created it.

    Tokens of several rounds become one output per request, so memory is bounded by the requests, however slow the
    consumer is.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._event_loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._refusals: dict[int, str] = {}
        self._ended_by: Exception | None = None
        self._urgent = False
        self._due_at = 0.0

    def put(self, number: int, output: RequestOutput, *, urgent: bool) -> None:
        """Add one round's output of a request; an urgent one is sent at the next `flush`."""
        with self._lock:
            self._outputs.setdefault(number, []).append(output)
            self._urgent |= urgent

    def refuse(self, number: int, reason: str) -> None:
        """Tell the client that its request will never run."""
        with self._lock:
            self._refusals[number] = reason
            self._urgent = True

    def flush(self, now: float, *, idle: bool = False) -> None:
        """Wake the consumer if something urgent waits, the interval has passed, or no further round will come.

        One wake-up per message: each costs the engine's thread the interpreter lock for a moment.
        """
        with self._lock:
            due = bool(self._outputs) and (idle or now >= self._due_at)
            if not (due or self._urgent):
                return
            self._urgent = False
            self._due_at = now + self._interval_s
        self._wake()

    def end(self, error: Exception) -> None:
        """Raise `error` in the consumer once it has taken what is there."""
        with self._lock:
            self._ended_by = self._ended_by or error
        self._wake()

    async def take(self) -> list[WireOutput]:
        """The next message.

        Raises:
            Exception: the one `end` was called with.
        """
        while True:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                outputs, self._outputs = self._outputs, {}
                refusals, self._refusals = self._refusals, {}
                ended_by = self._ended_by
            message = [pack_output(number, merge(rounds)) for number, rounds in outputs.items()]
            message += [pack_refusal(number, reason) for number, reason in refusals.items()]
            if ended_by is not None:
                self._ready.set()
                if not message:
                    raise ended_by
            if message:
                return message

    def _wake(self) -> None:
        try:
            self._event_loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            # The consumer's event loop is closed: the process is going down and nobody waits any more.
            self._ended_by = self._ended_by or ClientGone("the event loop is closed")
