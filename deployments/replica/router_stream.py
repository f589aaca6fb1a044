"""Outputs on their way to one router: collected in the engine's process, and merged in the replica's process until the
router reads them.
"""

import asyncio
import logging
import pickle
from collections.abc import Iterable
from typing import Any

from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.fleet.wire import EngineReport, PendingOutputs, Verdict, WireOutput, encode
from wingbeat.runtime.kv.block_hashes import CacheChanges, CacheLog
from wingbeat.runtime.scheduling.request import RequestOutput

logger = logging.getLogger(__name__)


class Outbox:
    """Outputs of one router's requests in the engine's process, until the next message to the router.

    The engine's thread uses this class. Tokens of several rounds are merged into one output per request. Memory is
    therefore bounded by the number of requests, even if nothing can be sent for a long time.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._waiting = PendingOutputs()
        self._urgent = False
        self._due_at = 0.0

    def put(self, number: int, output: RequestOutput, *, urgent: bool) -> None:
        """Add one round's output of a request.

        An urgent output is due at once. If the output cannot be encoded, the request fails, and this failure is urgent
        too.
        """
        self._urgent |= urgent
        try:
            self._waiting.put(WireOutput.of(number, output))
        except Exception as error:
            logger.exception("The output of request %s cannot be sent", output.request_id)
            self.give_up(number, Verdict.FAILED, f"its output cannot be sent: {type(error).__name__}")

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Add a report to the client that this engine will not finish the request."""
        self._waiting.give_up(number, verdict, reason)
        self._urgent = True

    def due(self, now: float, *, idle: bool = False) -> bool:
        """Return whether outputs are to be sent now.

        An urgent output is sent at once. Other outputs are sent once the interval since the last message has passed, or
        at once if the engine is idle.
        """
        return self._urgent or (bool(self._waiting) and (idle or now >= self._due_at))

    def take(self, now: float) -> bytes:
        """Return all outputs as one encoded message, and empty the outbox."""
        self._urgent, self._due_at = False, now + self._interval_s
        return encode(self._waiting.drain())


class RouterStream:
    """Queue in the replica of messages to one router, consumed on the event loop that fills it.

    Messages that were not consumed are merged into one. Memory is therefore bounded by the number of requests, even if
    the consumer is slow.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._outputs = PendingOutputs()
        self._changes = CacheLog()
        self._names: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._ended_by: Exception | None = None

    def put(self, outputs: Iterable[WireOutput]) -> None:
        """Add a message's outputs."""
        for output in outputs:
            self._outputs.put(output)
        self._ready.set()

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Add a report to the router that this engine will not finish the request."""
        self._outputs.give_up(number, verdict, reason)
        self._ready.set()

    def tell_cached(self, changes: CacheChanges) -> None:
        """Add changes of the engine's prefix cache."""
        self._changes.add(changes)
        self._ready.set()

    def tell_names(self, changes: NameChanges) -> None:
        """Add changed bindings of names, by kind."""
        self._names |= changes
        self._ready.set()

    def tell(self, **state: Any) -> None:
        """Report the engine's state: fields of `EngineReport`."""
        self._state |= state
        self._ready.set()

    def end(self, error: Exception) -> None:
        """Raise `error` in the consumer once all messages are consumed; later calls do not replace the first error."""
        self._ended_by = self._ended_by or error
        self._ready.set()

    async def take(self) -> bytes:
        """Wait for messages and return them as one encoded message.

        Raises:
            Exception: the error passed to `end`.
        """
        while True:
            report = self._report()
            if self._outputs or report is not None:
                return encode(self._outputs.drain(), report)
            if self._ended_by is not None:
                raise self._ended_by
            self._ready.clear()
            await self._ready.wait()

    def _report(self) -> EngineReport | None:
        names = pickle.dumps(self._names) if self._names else None
        report = EngineReport(changes=self._changes.drain(), names=names, **self._state)
        self._names, self._state = {}, {}
        return None if report == EngineReport() else report
