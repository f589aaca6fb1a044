"""Outputs on their way from the engine's process to one router: conflated while the router is behind."""

import asyncio
import logging

from wingbeat.deployments.fleet.wire import (
    GIVEN_UP,
    EngineReport,
    GivenUp,
    Verdict,
    WireOutput,
    join,
    pack_given_up,
    pack_report,
)
from wingbeat.runtime.kv.cache_log import CacheChanges, CacheLog

logger = logging.getLogger(__name__)


class RouterStream:
    """Filled with what the engine sent, taken by one consumer on the same event loop.

    Messages that nobody took become one, so memory is bounded by the requests, however slow the consumer is.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._outputs: dict[int, WireOutput] = {}
        self._last_words: dict[int, WireOutput] = {}
        """Of requests that are given up; they go behind the outputs, and nothing more of these requests does."""
        self._changes = CacheLog()
        self._others: tuple[int, int] | None = None
        self._adapters: tuple[tuple, ...] | None = None
        self._prefixes: tuple[tuple, ...] | None = None
        self._ended_by: Exception | None = None

    def put(self, message: list[WireOutput]) -> None:
        """Add a message; an output that fits no earlier one gives up its request, and no other."""
        for packed in message:
            number = packed[0]
            if number in self._last_words:
                continue
            if packed[GIVEN_UP] is not None:
                self._last_words[number] = packed
                continue
            try:
                self._outputs[number] = join(self._outputs[number], packed) if number in self._outputs else packed
            except Exception as error:
                logger.exception("The outputs of request %s do not fit together", number)
                reason = f"its outputs do not fit together: {type(error).__name__}"
                self._last_words[number] = pack_given_up(number, GivenUp(Verdict.FAILED, reason))
                del self._outputs[number]
        self._ready.set()

    def tell_cached(self, changes: CacheChanges) -> None:
        """Add what the engine's prefix cache has gained and lost."""
        self._changes.add(changes)
        self._ready.set()

    def tell_others(self, num_requests: int, num_tokens: int) -> None:
        """What other routers have there now."""
        self._others = num_requests, num_tokens
        self._ready.set()

    def tell_adapters(self, entries: tuple[tuple, ...]) -> None:
        """What `AdapterCatalog.changes` says now."""
        self._adapters = entries
        self._ready.set()

    def tell_prefixes(self, entries: tuple[tuple, ...]) -> None:
        """What `PrefixCatalog.changes` says now."""
        self._prefixes = entries
        self._ready.set()

    def end(self, error: Exception) -> None:
        """Raise `error` in the consumer once it has taken what is there; the first one counts."""
        self._ended_by = self._ended_by or error
        self._ready.set()

    async def take(self) -> list[WireOutput]:
        """The next message; a report stands before the outputs.

        Raises:
            Exception: the one `end` was called with.
        """
        while not (message := self._waiting()):
            if self._ended_by is not None:
                raise self._ended_by
            self._ready.clear()
            await self._ready.wait()
        return message

    def _waiting(self) -> list[WireOutput]:
        report = EngineReport(self._changes.take(), self._others, self._adapters, self._prefixes)
        message = [] if report == EngineReport() else [pack_report(report)]
        message += [*self._outputs.values(), *self._last_words.values()]
        self._others = self._adapters = self._prefixes = None
        self._outputs, self._last_words = {}, {}
        return message
