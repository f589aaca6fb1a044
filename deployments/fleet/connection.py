"""A router's connection to one engine: one stream for all requests of the router, and counts of outstanding tokens."""

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
"""Maximum seconds to wait until cancelled calls have ended; then the connection counts as lost, whether or not they
have ended.
"""
RENEW_INTERVAL_S = 3.0
"""Seconds without other calls after which an empty call is sent, so that the replica does not close the connection, and
so that this side detects a replica that hangs.
"""
CALL_S = 30.0
"""Time limit in seconds of a call that the replica answers without its engine. When the limit is reached, the
connection counts as lost, and its requests move to other engines.
"""
WORK_S = 960.0
"""Time limit in seconds of a call that the engine handles, such as computing a prefix. The limit is slightly above the
limit that the replica applies to such a call.
"""
DESCRIBE_S = 120.0
"""Time limit in seconds of a call that may wait until a replica has started; when the limit is reached, the call is
repeated.
"""


class EngineTransport(Protocol):
    """Calls to the engines of one model, by engine id. If the engine is lost, a call raises the exception of its
    transport.
    """

    async def describe(self) -> ModelInfo:
        """Returns the description of the model, which any engine can give; waits until there is an engine."""
        ...

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Calls `listener` with the ids of the live engines, now and after each change, from any thread.

        Returns a function that ends the subscription.
        """
        ...

    def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Yields messages for this client, encoded by `encode`; requests may be submitted after the first message."""
        ...

    async def call(self, engine_id: str, name: str, **arguments: Any) -> Any:
        """Calls a method of `wingbeat.deployments.replica.verifier_replica.Verifier`."""
        ...


class EngineConnection:
    """Submits requests to one engine and distributes the engine's messages to the requests' streams.

    Args:
        on_end: called when the connection has ended.
        on_tokens: called for each message with its number of new tokens.
        on_open: called when the engine begins to accept requests.
        answers: expected lengths of answers, for the estimate of outstanding tokens.
        on_names: called with changes of names that the replica reports.
    """

    def __init__(
        self,
        engine_id: str,
        transport: EngineTransport,
        on_end: Callable[["EngineConnection"], None],
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_open: Callable[[], None] = lambda: None,
        answers: AnswerLength | None = None,
        on_names: Callable[[NameChanges], object] = lambda changes: None,
    ) -> None:
        self.engine_id = engine_id
        self.client_id = uuid.uuid4().hex
        self.open = False
        """Whether requests may be submitted."""
        self.retiring = False
        """Whether the connection accepts no further requests and closes when its last request ends."""
        self.index = PrefixIndex()
        """Content of the engine's prefix cache, as the engine has reported it."""
        self.other_requests = 0
        """Number of other routers' requests at the engine, as the engine has reported it."""
        self._other_tokens = 0
        self.weights = ""
        """Digest of the pushed weights that the engine serves; empty for the weights that the settings name."""
        self.stalled = False
        """Whether the engine has made no progress for long. If the engine does not continue, its replica replaces
        it.
        """
        self._answers = answers or AnswerLength()
        self._takes = True
        """Whether the engine accepts new requests. False while the engine's weights are replaced, and after the engine
        has given up requests.
        """
        self._transport = transport
        self._on_end = on_end
        self._on_tokens = on_tokens
        self._on_open = on_open
        self._on_names = on_names
        self._streams: dict[int, RequestStream] = {}
        self._next_number = 0
        self._submits: list[WireRequest] = []
        self._aborts: list[int] = []
        self._withdrawals: list[int] = []
        self._send = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens still to be computed plus tokens expected to be generated, summed over the unfinished requests
        of all routers.
        """
        expected = self._answers.expected_tokens
        own = sum(stream.uncomputed_tokens + expected(stream.unwritten_tokens) for stream in self._streams.values())
        return own + self._other_tokens

    @property
    def unwritten_tokens(self) -> int:
        """Maximum number of tokens still to be generated, summed over the unfinished requests of this router."""
        return sum(stream.unwritten_tokens for stream in self._streams.values())

    def submit(self, request: Request, num_cached_tokens: int = 0) -> RequestStream:
        """Queues a request for the next call to the engine, which carries all queued requests.

        Args:
            num_cached_tokens: number of the prompt's tokens that the engine has cached, as far as the router knows.
        """
        stream = RequestStream(self._next_number, request, num_cached_tokens)
        self._next_number += 1
        self._streams[stream.number] = stream
        self._submits.append(WireRequest(stream.number, request))
        self._send.set()
        return stream

    def release(self, stream: RequestStream) -> None:
        """Removes a request; if the request has not ended, aborts it in the engine."""
        if self._streams.pop(stream.number, None) is not None and not stream.ended:
            self._aborts.append(stream.number)
            self._send.set()
        self._close_if_retired()

    def waiting(self) -> list[RequestStream]:
        """Returns the requests that have no output yet and were not withdrawn, oldest first."""
        return [s for s in self._streams.values() if not (s.begun or s.withdrawn or s.ended)]

    def withdraw(self, streams: Iterable[RequestStream]) -> None:
        """Asks the engine to return requests. Requests that have not begun to run then end with EngineLost."""
        for stream in streams:
            stream.withdrawn = True
            self._withdrawals.append(stream.number)
        self._send.set()

    def retire(self) -> None:
        """Accepts no further requests from now on; closes the connection when its last request has ended."""
        self.retiring = True
        self._close_if_retired()

    def give_up_all(self, reason: str) -> None:
        """Ends every request with EngineLost, so that another engine continues it; no request is suspected of a
        failure.
        """
        self.fail_all(EngineLost(reason, taken_up=False))

    async def close(self) -> None:
        """Closes the connection now; running requests end with EngineLost."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=2 * END_S)

    def fail_all(self, error: Exception) -> None:
        """Ends every running request with an error."""
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
            # The wait needs no timeout, because the sender calls periodically, and each of its calls has a time limit:
            # if the replica hangs, the sender ends the connection.
            done, _ = await asyncio.wait([sender, receiver], return_when=asyncio.FIRST_COMPLETED)
            reason = next((task.exception() for task in done if task.exception() is not None), None)
        finally:
            self.open = False
            for task in (sender, receiver):
                task.cancel()
            await asyncio.wait([sender, receiver], timeout=END_S)
            if reason is not None:
                first_line = next(iter(str(reason).splitlines()), "")
                logger.warning("Lost engine %s: %s: %s", self.engine_id, type(reason).__name__, first_line)
            self._lose_all(is_dead=not isinstance(reason, RouterGone))
            self._on_end(self)

    def _lose_all(self, is_dead: bool) -> None:
        """Ends every request with EngineLost.

        If the engine is dead, requests that may have run count as possible causes of its death (`taken_up`).
        """
        unsent = {waiting.number for waiting in self._submits}
        # An engine runs requests marked `alone` one at a time, and no other request at the same time. So if such a
        # request was running, no other request can be the cause.
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
        """Passes an output to its request; returns the output's number of tokens."""
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
                # `asyncio.wait_for` is not used, because before Python 3.12 it loses a cancellation that coincides with
                # the event.
                async with asyncio.timeout(RENEW_INTERVAL_S):
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


class PatientEngines:
    """`EngineTransport` that adds time limits to the calls of another transport.

    Calls raise the other transport's errors; at the time limit they raise TimeoutError, which names the engine and the
    operation.
    """

    def __init__(self, transport: EngineTransport) -> None:
        self._transport = transport
        self.subscribe: Callable[[Callable[[frozenset[str]], None]], Callable[[], None]] = transport.subscribe

    async def describe(self) -> ModelInfo:
        """Returns the description of the model from any engine; waits until there is an engine."""
        while True:
            try:
                async with asyncio.timeout(DESCRIBE_S):
                    return await self._transport.describe()
            except TimeoutError:
                logger.warning("No engine has answered within %.0f s which model it serves: asking again", DESCRIBE_S)

    def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Yields messages without a time limit, because the periodic calls of `EngineConnection` detect an engine that
        hangs.
        """
        return self._transport.stream(engine_id, client_id)

    async def call(self, engine_id: str, name: str, *, works: bool = False, **arguments: Any) -> Any:
        """Calls the other transport with a time limit.

        Args:
            works: whether the engine itself handles the operation. The time limit is then `WORK_S` instead of `CALL_S`.
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
