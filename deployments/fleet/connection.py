"""One router's connection to one engine: one stream for all its requests, and what the engine still owes."""

import asyncio
import logging
import pickle
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Protocol

from wingbeat.cluster.routing import AnswerLength, PrefixIndex
from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.fleet.interface import ModelInfo, RouterGone
from wingbeat.deployments.fleet.request_stream import EngineLost, RequestStream
from wingbeat.deployments.fleet.wire import EngineReport, Verdict, WireOutput, WireRequest, decode
from wingbeat.runtime.scheduling.request import Request

logger = logging.getLogger(__name__)
END_S = 5.0
"""For calls that were cancelled to end; the connection is lost whether they do or not."""
CALL_S = 30.0
"""For what a replica does by itself. A connection whose call takes longer is lost, and its requests go on elsewhere."""
WORK_S = 960.0
"""For what its engine does, such as computing a prefix: a little longer than the replica gives the engine."""
DESCRIBE_S = 120.0
"""For an answer that may wait for a replica to start; then it is asked for again."""


class EngineTransport(Protocol):
    """The engines of one model, and calls to them by id, which raise whatever the transport raises when one is gone."""

    async def describe(self) -> ModelInfo:
        """The model, from any engine; waits until one is there."""
        ...

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Report the live engines now and at every change, from any thread; returns the way to unsubscribe."""
        ...

    def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Messages for this client, as `encode` makes them; the first one as soon as requests may be submitted."""
        ...

    async def call(self, engine_id: str, name: str, **arguments: Any) -> Any:
        """Call a method of `wingbeat.deployments.replica.verifier_replica.Verifier`."""
        ...


class EngineConnection:
    """Submits requests to one engine and hands its messages out to them."""

    def __init__(
        self,
        engine_id: str,
        transport: EngineTransport,
        on_end: Callable[["EngineConnection"], None],
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_open: Callable[[], None] = lambda: None,
        answers: AnswerLength | None = None,
        on_names: Callable[[NameChanges], object] = lambda changes: None,
        renew_interval_s: float = 3.0,
    ) -> None:
        self.engine_id = engine_id
        self.client_id = uuid.uuid4().hex
        self.open = False
        self.retiring = False
        self.index = PrefixIndex()
        """What its prefix cache holds, as far as it has told."""
        self.other_requests = 0
        """Of other routers there, as it has told; so the tokens they have outstanding."""
        self._other_tokens = 0
        self.weights = ""
        """Digest of what the engine serves; empty for what the settings name. Another engine has another connection."""
        self.stalled = False
        """Whether the engine makes no progress: it is replaced unless it goes on."""
        self._answers = answers or AnswerLength()
        self._takes = True
        """Whether the engine takes what has not begun: not while its weights are replaced, nor after its last words."""
        self._transport = transport
        self._on_end = on_end
        self._on_tokens = on_tokens
        self._on_open = on_open
        self._on_names = on_names
        self._renew_interval_s = renew_interval_s
        self._streams: dict[int, RequestStream] = {}
        self._next_number = 0
        self._submits: list[WireRequest] = []
        self._aborts: list[int] = []
        self._withdrawals: list[int] = []
        self._send = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def num_requests(self) -> int:
        """Requests not finished."""
        return len(self._streams)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens to compute and tokens expected of the requests not finished, other routers' included."""
        expected = self._answers.expected_tokens
        own = sum(stream.uncomputed_tokens + expected(stream.unwritten_tokens) for stream in self._streams.values())
        return own + self._other_tokens

    @property
    def unwritten_tokens(self) -> int:
        """Tokens still to come, at most, of the requests not finished."""
        return sum(stream.unwritten_tokens for stream in self._streams.values())

    def submit(self, request: Request, num_cached_tokens: int = 0) -> RequestStream:
        """Queue a request for the next call to the engine; requests of one moment travel together.

        Args:
            num_cached_tokens: of its prompt, that the engine is known to have.
        """
        stream = RequestStream(self._next_number, request, num_cached_tokens)
        self._next_number += 1
        self._streams[stream.number] = stream
        self._submits.append(WireRequest(stream.number, request))
        self._send.set()
        return stream

    def release(self, stream: RequestStream) -> None:
        """Forget a request; aborts it in the engine unless it has ended."""
        if self._streams.pop(stream.number, None) is not None and not stream.ended:
            self._aborts.append(stream.number)
            self._send.set()
        self._close_if_retired()

    def waiting(self) -> list[RequestStream]:
        """Requests of which nothing has come back and that were not asked back, oldest first."""
        return [s for s in self._streams.values() if not (s.begun or s.asked_back or s.ended)]

    def withdraw(self, streams: Iterable[RequestStream]) -> None:
        """Ask for requests back; those that have not begun to run there end by EngineLost."""
        for stream in streams:
            stream.asked_back = True
            self._withdrawals.append(stream.number)
        self._send.set()

    def retire(self) -> None:
        """Take no further requests; close when the last one ends."""
        self.retiring = True
        self._close_if_retired()

    def give_up_all(self, reason: str) -> None:
        """Have every request go on elsewhere, from the tokens that have come; no blame on any of them."""
        self.fail_all(EngineLost(reason, taken_up=False))

    async def close(self) -> None:
        """Close now; running requests end by EngineLost."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=2 * END_S)

    def fail_all(self, error: Exception) -> None:
        """End every running request by an error."""
        for stream in list(self._streams.values()):
            if not stream.ended:
                stream.fail(error)

    def _close_if_retired(self) -> None:
        if self.retiring and not self._streams and not self._aborts:
            self._task.cancel()

    async def _run(self) -> None:
        sender = asyncio.get_running_loop().create_task(self._send_loop())
        receiver = asyncio.get_running_loop().create_task(self._receive_loop())
        reason: BaseException | None = None
        try:
            # As long as the connection lasts: signs of life, each with its limit, end it where the other side hangs.
            done, _ = await asyncio.wait([sender, receiver], return_when=asyncio.FIRST_COMPLETED)
            reason = next((task.exception() for task in done if task.exception() is not None), None)
        finally:
            self.open = False
            for task in (sender, receiver):
                task.cancel()
            await asyncio.wait([sender, receiver], timeout=END_S)
            if reason is not None:
                logger.warning("Lost engine %s: %s: %s", self.engine_id, type(reason).__name__, _first_line(reason))
            self._lose_all(is_dead=not isinstance(reason, RouterGone))
            self._on_end(self)

    def _lose_all(self, is_dead: bool) -> None:
        """Have every request go on elsewhere, or at the same engine where that is not dead and has no blame to give."""
        unsent = {waiting.number for waiting in self._submits}
        # The engine runs requests that run alone in the order in which they came: the others are innocent.
        alone = next((n for n, stream in self._streams.items() if stream.alone and not stream.ended), None)
        for number, stream in list(self._streams.items()):
            if not stream.ended:
                stream.ended = True
                ran = is_dead and number not in unsent and (alone in unsent or alone in (None, number))
                stream.fail(EngineLost(f"engine {self.engine_id} is gone", taken_up=ran))

    async def _receive_loop(self) -> None:
        async for message in self._transport.stream(self.engine_id, self.client_id):
            outputs, report = decode(message)
            if report is not None:
                self._learn(report)
            if self._takes and not self.open:
                self.open = True
                self._on_open()
            if num_tokens := sum(map(self._take, outputs)):
                self._on_tokens(num_tokens)

    def _take(self, output: WireOutput) -> int:
        """Give an output to its request, and return its tokens' number."""
        stream, num_tokens = self._streams.get(output.number), len(output.token_ids)
        if stream is None:
            return 0
        if output.given_up is not None and output.given_up.verdict in (Verdict.RETURNED, Verdict.SUSPECTED):
            self._takes = self.open = False
        stream.put(output)
        return num_tokens

    def _learn(self, report: EngineReport) -> None:
        if report.changes is not None:
            self.index.apply(report.changes)
        if report.names is not None:
            self._on_names(pickle.loads(report.names))
        if report.stalled is not None:
            self.stalled = report.stalled
        if report.takes is not None:
            self._takes, self.open = report.takes, self.open and report.takes
        if report.weights is not None:
            self.weights = report.weights
        if report.others is not None:
            self.other_requests, self._other_tokens = report.others

    async def _send_loop(self) -> None:
        while True:
            renew = False
            try:
                # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(self._renew_interval_s):
                    await self._send.wait()
            except TimeoutError:
                renew = self.open or not self._takes
            self._send.clear()
            requests, self._submits = self._submits, []
            withdrawn, self._withdrawals = self._withdrawals, []
            aborted, self._aborts = self._aborts, []
            if requests or withdrawn or aborted or renew:
                changes = {"requests": requests, "withdrawn": withdrawn, "aborted": aborted}
                await self._transport.call(self.engine_id, "exchange", client_id=self.client_id, **changes)
            self._close_if_retired()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


class PatientEngines:
    """An `EngineTransport` over another one.

    Every call raises TimeoutError, by the name of what did not answer, beside what the other one raises.
    """

    def __init__(self, transport: EngineTransport) -> None:
        self._transport = transport
        self.subscribe: Callable[[Callable[[frozenset[str]], None]], Callable[[], None]] = transport.subscribe

    async def describe(self) -> ModelInfo:
        """The model, from any engine; waits until one is there."""
        while True:
            try:
                async with asyncio.timeout(DESCRIBE_S):
                    return await self._transport.describe()
            except TimeoutError:
                logger.warning("No engine has said within %.0f s what it serves: asking again", DESCRIBE_S)

    def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Messages without a limit: signs of life, which have one, end a connection where no message comes."""
        return self._transport.stream(engine_id, client_id)

    async def call(self, engine_id: str, name: str, *, works: bool = False, **arguments: Any) -> Any:
        """A call of the other one.

        Args:
            works: whether the engine may take its time for it.
        """
        limit_s = WORK_S if works else CALL_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._transport.call(engine_id, name, **arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            asked = arguments.get("operation", name)
            raise TimeoutError(f"engine {engine_id} has not answered {asked} within {limit_s:.0f} s") from None
