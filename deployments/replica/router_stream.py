"""Outputs on their way to one router: gathered in the engine's process, conflated in the replica while it is behind."""

import asyncio
import logging

from wingbeat.deployments.fleet.wire import (
    GIVEN_UP,
    EngineReport,
    GivenUp,
    Verdict,
    WireOutput,
    join,
    merge,
    pack_given_up,
    pack_output,
    pack_report,
)
from wingbeat.runtime.kv.cache_log import CacheChanges, CacheLog
from wingbeat.runtime.scheduling.request import RequestOutput

logger = logging.getLogger(__name__)


class Outbox:
    """Outputs of one router's requests in the engine's process, until the next message to it.

    Filled and emptied by the engine's thread. Tokens of several rounds become one output per request, so memory is
    bounded by the requests, however long nothing can be sent.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._given_up: dict[int, GivenUp] = {}
        self._urgent = False
        self._due_at = 0.0

    def put(self, number: int, output: RequestOutput, *, urgent: bool) -> None:
        """Add one round's output of a request; an urgent one is due at once."""
        self._outputs.setdefault(number, []).append(output)
        self._urgent |= urgent

    def give_up(self, number: int, verdict: Verdict, reason: str) -> None:
        """Tell the client that its request will not be finished here."""
        self._given_up[number] = GivenUp(verdict, reason)
        self._urgent = True

    def due(self, now: float, *, idle: bool = False) -> bool:
        """Whether something urgent waits, or anything where the interval has passed or no further round will come."""
        return self._urgent or (bool(self._outputs) and (idle or now >= self._due_at))

    def take(self, now: float) -> list[WireOutput]:
        """The next message."""
        outputs, self._outputs = self._outputs, {}
        given_up, self._given_up = self._given_up, {}
        self._urgent, self._due_at = False, now + self._interval_s
        message = [_pack(number, rounds) for number, rounds in outputs.items()]
        return message + [pack_given_up(number, word) for number, word in given_up.items()]


def _pack(number: int, rounds: list[RequestOutput]) -> WireOutput:
    """One request's part of a message; what cannot be packed ends this request and not the message."""
    try:
        return pack_output(number, merge(rounds))
    except Exception as error:
        logger.exception("The output of request %s cannot be sent", rounds[-1].request_id)
        return pack_given_up(number, GivenUp(Verdict.FAILED, f"its output cannot be sent: {type(error).__name__}"))


class RouterStream:
    """The messages of one router in the replica: what the engine sent, taken by one consumer on the same event loop.

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
        self._stalled: bool | None = None
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

    def tell_stalled(self, stalled: bool) -> None:
        """Whether the engine makes no progress."""
        self._stalled = stalled
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
        report = EngineReport(self._changes.take(), self._others, self._adapters, self._prefixes, self._stalled)
        message = [] if report == EngineReport() else [pack_report(report)]
        message += [*self._outputs.values(), *self._last_words.values()]
        self._others = self._adapters = self._prefixes = self._stalled = None
        self._outputs, self._last_words = {}, {}
        return message
