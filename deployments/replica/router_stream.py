"""Outputs on their way to one router: gathered in the engine's process, conflated in the replica while it is behind."""

import asyncio
import logging
import pickle
from collections.abc import Iterable
from typing import Any

from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.fleet.wire import Conflated, EngineReport, Verdict, WireOutput, encode
from wingbeat.runtime.kv.block_hashes import CacheChanges, CacheLog
from wingbeat.runtime.scheduling.request import RequestOutput

logger = logging.getLogger(__name__)


class Outbox:
    """Outputs of one router's requests in the engine's process, until the next message to it.

    Filled and emptied by the engine's thread. Tokens of several rounds become one output per request, so memory is
    bounded by the requests, however long nothing can be sent.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._waiting = Conflated()
        self._urgent = False
        self._due_at = 0.0

    def put(self, number: int, output: RequestOutput, *, urgent: bool) -> None:
        """Add one round's output of a request; an urgent one is due at once, as is one that cannot be sent."""
        self._urgent |= urgent
        try:
            self._waiting.put(WireOutput.of(number, output))
        except Exception as error:
            logger.exception("The output of request %s cannot be sent", output.request_id)
            self.give_up(number, Verdict.FAILED, f"its output cannot be sent: {type(error).__name__}")

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Tell the client that its request will not be finished here."""
        self._waiting.give_up(number, verdict, reason)
        self._urgent = True

    def due(self, now: float, *, idle: bool = False) -> bool:
        """Whether something urgent waits, or anything where the interval has passed or no further round will come."""
        return self._urgent or (bool(self._waiting) and (idle or now >= self._due_at))

    def take(self, now: float) -> bytes:
        """The next message."""
        self._urgent, self._due_at = False, now + self._interval_s
        return encode(self._waiting.take())


class RouterStream:
    """The messages of one router in the replica: what the engine sent, taken by one consumer on the same event loop.

    Messages that nobody took become one, so memory is bounded by the requests, however slow the consumer is.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._outputs = Conflated()
        self._changes = CacheLog()
        self._others: tuple[int, int] | None = None
        self._names: dict[str, Any] = {}
        self._stalled: bool | None = None
        self._takes: bool | None = None
        self._weights: str | None = None
        self._ended_by: Exception | None = None

    def put(self, outputs: Iterable[WireOutput]) -> None:
        """Add a message's outputs."""
        for output in outputs:
            self._outputs.put(output)
        self._ready.set()

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Tell the router that its request will not be finished here."""
        self._outputs.give_up(number, verdict, reason)
        self._ready.set()

    def tell_cached(self, changes: CacheChanges) -> None:
        """Add what the engine's prefix cache has gained and lost."""
        self._changes.add(changes)
        self._ready.set()

    def tell_others(self, num_requests: int, num_tokens: int) -> None:
        """What other routers have there now."""
        self._others = num_requests, num_tokens
        self._ready.set()

    def tell_names(self, changes: NameChanges) -> None:
        """Meanings of names now, by kind."""
        self._names |= changes
        self._ready.set()

    def tell_stalled(self, stalled: bool) -> None:
        """Whether the engine makes no progress."""
        self._stalled = stalled
        self._ready.set()

    def tell_takes(self, takes: bool) -> None:
        """Whether the engine takes requests that have not begun."""
        self._takes = takes
        self._ready.set()

    def tell_weights(self, weights: str) -> None:
        """Weights that write from now on."""
        self._weights = weights
        self._ready.set()

    def end(self, error: Exception) -> None:
        """Raise `error` in the consumer once it has taken what is there; the first one counts."""
        self._ended_by = self._ended_by or error
        self._ready.set()

    async def take(self) -> bytes:
        """The next message.

        Raises:
            Exception: the one `end` was called with.
        """
        while True:
            report = self._report()
            if self._outputs or report is not None:
                return encode(self._outputs.take(), report)
            if self._ended_by is not None:
                raise self._ended_by
            self._ready.clear()
            await self._ready.wait()

    def _report(self) -> EngineReport | None:
        names = pickle.dumps(self._names) if self._names else None
        report = EngineReport(self._changes.take(), self._others, names, self._stalled, self._takes, self._weights)
        self._others, self._names, self._stalled, self._takes, self._weights = None, {}, None, None, None
        return None if report == EngineReport() else report
