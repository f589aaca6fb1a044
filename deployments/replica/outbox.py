"""Outputs on their way from the engine's thread to one router: conflated while the router is behind."""

import asyncio
import logging
import threading

from wingbeat.deployments.fleet.wire import GivenUp, Verdict, WireOutput, merge, pack_given_up, pack_output
from wingbeat.runtime.scheduling.request import RequestOutput

logger = logging.getLogger(__name__)


class RouterGone(Exception):
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
        self._given_up: dict[int, GivenUp] = {}
        self._ended_by: Exception | None = None
        self._urgent = False
        self._due_at = 0.0

    def put(self, number: int, output: RequestOutput, *, urgent: bool) -> None:
        """Add one round's output of a request; an urgent one is sent at the next `flush`."""
        with self._lock:
            self._outputs.setdefault(number, []).append(output)
            self._urgent |= urgent

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Tell the client that its request will not be finished here."""
        with self._lock:
            self._given_up[number] = GivenUp(verdict, reason)
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
                given_up, self._given_up = self._given_up, {}
                ended_by = self._ended_by
            message = [_pack(number, rounds) for number, rounds in outputs.items()]
            message += [pack_given_up(number, word) for number, word in given_up.items()]
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
            self._ended_by = self._ended_by or RouterGone("the event loop is closed")


def _pack(number: int, rounds: list[RequestOutput]) -> WireOutput:
    """One request's part of a message; what cannot be packed ends this request and not the message."""
    try:
        return pack_output(number, merge(rounds))
    except Exception as error:
        logger.exception("The output of request %s cannot be sent", rounds[-1].request_id)
        return pack_given_up(number, GivenUp(Verdict.FAILED, f"its output cannot be sent: {type(error).__name__}"))
