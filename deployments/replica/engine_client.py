"""The replica's client of an engine's process: streams, requests and calls over the link; handles the end of the
engine's process.
"""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from wingbeat.cluster.channels.link import Link
from wingbeat.deployments.fleet.interface import RouterGone
from wingbeat.deployments.fleet.wire import Verdict, WireRequest, decode
from wingbeat.deployments.parts import first_result
from wingbeat.deployments.replica.engine.engine_messages import (
    EngineStart,
    EngineStarted,
    ToEngine,
    ToReplica,
    owner,
    portable,
)
from wingbeat.deployments.replica.engine_watch import EngineWatch, Look
from wingbeat.deployments.replica.router_stream import RouterStream
from wingbeat.deployments.replica.router_streams import ClientLoads, RouterStreams

CLOGGED_S = 5e-3
"""Seconds between two attempts to write to a full ring buffer."""
ANSWER_S = 900.0
"""Maximum seconds to wait for the result of a call. The work of a call can be long, such as the prefill of a pinned
prefix.
"""

AskDrafter = Callable[[bytes], Awaitable[bytes | None]]
"""Function from pickled `DrafterTerms` to pickled `DrafterNeeds`, which the replica passes on without unpickling. The
function returns None if the engine's process has to determine the needs itself.
"""


class EngineFailed(RuntimeError):
    """The engine's process is gone, and the requests that it ran have ended with it."""


class EngineClient:
    """Connection to one engine process.

    The object is used on one event loop only; no method blocks the event loop while the engine works.

    Args:
        weights: digest of the pushed weights that the engine uses; empty if it uses the weights that the settings name.
    """

    def __init__(self, link: Link, ask_drafter: AskDrafter | None = None, weights: str = "") -> None:
        self.weights = weights
        self._link = link
        self._ask_drafter = ask_drafter
        self._event_loop = asyncio.get_running_loop()
        self._open: dict[tuple[str, int], int] = {}
        """For each open request, by client and number: the byte position in the link's stream at which the message that
        submits the request ends.
        """
        self._shared: dict[tuple[str, int], list[int]] = {}
        """For each request, by client and number: file descriptors of the shared memory that holds the media spans of
        the request's prompt.
        """
        self._held = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._started: asyncio.Future[EngineStarted] = self._event_loop.create_future()
        self._asking: asyncio.Task[None] | None = None
        self._retrying = False
        self.loads = ClientLoads()
        self._streams = RouterStreams(self.loads)
        self.tell_names = self._streams.tell_names
        self._lost = asyncio.Event()
        self.failure: EngineFailed | None = None
        self._event_loop.add_reader(link.fileno(), self._receive)

    @property
    def num_requests(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._open)

    async def start(self, start: EngineStart) -> EngineStarted:
        """Load the engine in its process.

        Raises:
            Exception: the error that prevented the start.
        """
        self._send((ToEngine.START, start))
        return await self._started

    def connect(self, client_id: str) -> RouterStream:
        """Open the stream of outputs to a client.

        Raises:
            EngineFailed: the engine is gone.
        """
        self.check_alive()
        return self._streams.open(client_id)

    def disconnect(self, client_id: str) -> None:
        """Close a client's stream and abort its open requests; a second call does nothing."""
        if not self._streams.close(client_id, RouterGone(f"client {client_id} was disconnected")):
            return
        for request in [request for request in self._open if request[0] == client_id]:
            del self._open[request]
            self._close_shared(request)
        if self.failure is None:
            self._send((ToEngine.DISCONNECT, client_id))

    def submit(self, client_id: str, requests: Iterable[WireRequest]) -> None:
        """Submit requests of a client; refusals arrive in the client's stream.

        Raises:
            RouterGone: the client is not connected.
            EngineFailed: the engine is gone.
            AttributeError: an object among the requests is malformed and has no number, so that its refusal cannot be
                sent.
        """
        self.check_alive()
        if client_id not in self._streams:
            raise RouterGone(f"client {client_id} is not connected to this engine")
        if self._held:
            requests = list(self._begun(client_id, requests))
        by_number = {one.number: one for one in self._with_shared_spans(client_id, requests)}
        end = self._send((ToEngine.SUBMIT, client_id, list(by_number.values())))
        for number, one in by_number.items():
            self._open.setdefault((client_id, number), end)
            self.loads.submitted(client_id, number, one.request)
        self._streams.tell_loads_soon()

    def _begun(self, client_id: str, requests: Iterable[WireRequest]) -> Iterator[WireRequest]:
        """Yield the requests that continue from earlier output tokens; give the other requests back.

        Requests with output tokens are accepted while the engine is held, because the current weights wrote these
        tokens.
        """
        for one in requests:
            if one.request.output_token_ids:
                yield one
            else:
                self._streams.get(client_id).give_up(
                    one.number, Verdict.WITHDRAWN, "its engine accepts no new requests"
                )

    def _with_shared_spans(self, client_id: str, requests: Iterable[WireRequest]) -> Iterator[WireRequest]:
        """Yield the requests with media spans moved to shared memory; a request fails if there is not enough shared
        memory.
        """
        for one in requests:
            if not one.request.spans:
                yield one
                continue
            try:
                shared, fd = first_result("share_spans", one)
            except OSError as error:
                self._streams.get(client_id).give_up(one.number, Verdict.FAILED, str(error))
                continue
            self._shared.setdefault((client_id, one.number), []).append(fd)
            yield shared

    def _close_shared(self, request: tuple[str, int]) -> None:
        for fd in self._shared.pop(request, ()):
            os.close(fd)

    def abort(self, client_id: str, numbers: Iterable[int]) -> None:
        """Stop requests and free their KV blocks; requests that are unknown or have ended are ignored."""
        numbers = list(numbers)
        for number in numbers:
            self._end_request(client_id, number)
        if self.failure is None:
            self._send((ToEngine.ABORT, client_id, numbers))

    def withdraw(self, client_id: str, numbers: Iterable[int]) -> None:
        """Withdraw requests. Requests that have not begun to run are given back in the stream; running requests
        continue.
        """
        if self.failure is None:
            self._send((ToEngine.WITHDRAW, client_id, list(numbers)))

    def hold(self) -> None:
        """From now on accept only requests that continue from output tokens; give back requests that have not begun to
        run.
        """
        self._held = True
        self._streams.tell(takes=False)
        for client_id, numbers in self.loads.unbegun().items():
            self.withdraw(client_id, numbers)

    def release(self) -> None:
        """Accept all requests again, after `hold`."""
        if self._held:
            self._held = False
            self._streams.tell(takes=True)

    def renew(self, weights: str) -> None:
        """Report to routers that the engine uses the weights with this digest from now on."""
        self.weights = weights
        self._streams.tell(weights=weights)

    def call(self, name: str, *arguments: Any) -> "asyncio.Future[Any]":
        """Run a method of `EngineCalls` between two rounds; the returned future gets the result or the exception of the
        method.

        The future gets EngineFailed if the engine is gone, and TimeoutError if the engine has not answered within
        `ANSWER_S`.
        """
        future = self._event_loop.create_future()
        if self.failure is not None:
            future.set_exception(self.failure)
            return future
        number = next(self._numbers)
        self._calls[number] = future
        late = self._event_loop.call_later(ANSWER_S, self._give_up_call, number, name)
        future.add_done_callback(lambda done: late.cancel())
        self._send((ToEngine.CALL, number, name, arguments))
        return future

    def stop(self) -> None:
        """Stop the engine after its current round; unfinished requests are given back."""
        if self.failure is None:
            self._send((ToEngine.STOP,))

    def check_alive(self) -> None:
        """Raise EngineFailed if the engine is gone."""
        if self.failure is not None:
            raise self.failure

    async def lost(self) -> None:
        """Wait until the engine is gone, for whatever reason."""
        await self._lost.wait()

    def look(self, watch: EngineWatch, now: float) -> Look:
        """Return the verdict of `watch` on the engine at the time `now`; also report to routers whether the engine is
        stalled.
        """
        link = self._link
        found = watch.look(now, link.pulse.read(), link.pulse.slowest_s(), link.num_read, link.num_unread > 0)
        self._streams.tell(stalled=found.stalled)
        return found

    def at_work_for(self) -> list[str]:
        """Return the engine-wide ids of the requests that the engine is working on now."""
        return self._link.pulse.names()

    def lose(self, reason: str, suspects: Iterable[str] = ()) -> None:
        """Handle the end of the engine's process: read the final messages, then end streams and calls.

        A second call does nothing. Requests that the engine had not read are returned to their routers; if one request
        ran alone, all others are returned. About the remaining requests, any of which may have caused the end, routers
        learn only that their engine is gone.

        Args:
            suspects: ids from `at_work_for`, if it is certain that one of these requests has caused the end.
        """
        if self.failure is None:
            self._receive()
        if self.failure is not None:
            return
        error = self.failure = EngineFailed(reason)
        self._event_loop.remove_reader(self._link.fileno())
        ran = {request for request, end in self._open.items() if self._link.was_read(end)}
        if (alone := self.loads.alone()) in ran:
            ran = {alone}
        blamed = ran & set(map(owner, suspects))
        for verdict, requests in ((Verdict.SUSPECTED, blamed), (Verdict.RETURNED, self._open.keys() - ran)):
            for client_id, number in requests:
                if (stream := self._streams.get(client_id)) is not None:
                    stream.give_up(number, verdict, reason)
        self._open.clear()
        for request in list(self._shared):
            self._close_shared(request)
        if self._asking is not None:
            self._asking.cancel()
        self._link.close()
        for future in (self._started, *self._calls.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks the exception as retrieved, because the waiting caller may be gone
        self._calls.clear()
        self._streams.end_all(error)
        self._lost.set()

    def _send(self, message: tuple) -> int:
        end = self._link.send(message)
        self._retry_later()
        return end

    def _retry_later(self) -> None:
        if self._link.clogged and not self._retrying:
            self._retrying = True
            self._event_loop.call_later(CLOGGED_S, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        if self.failure is None:
            self._link.flush()
            self._retry_later()

    def _receive(self) -> None:
        self._link.silence()
        for kind, *rest in self._link.receive():
            match kind:
                case ToReplica.OUTPUTS:
                    self._hand_out(*rest)
                case ToReplica.CACHED:
                    self._streams.tell_cached(*rest)
                case ToReplica.RESULT:
                    self._answer(*rest)
                case ToReplica.ASK_NEEDS:
                    self._asking = self._event_loop.create_task(self._ask(*rest))
                # `_started` is done here only if `start` was cancelled
                case ToReplica.STARTED if not self._started.done():
                    self._started.set_result(*rest)
                case ToReplica.FAILED if not self._started.done():
                    self._started.set_exception(*rest)
                case ToReplica.ENDED:
                    self.lose(*rest)
                    return

    def _hand_out(self, messages: dict[str, bytes]) -> None:
        for client_id, message in messages.items():
            stream = self._streams.get(client_id)
            if stream is None:
                continue
            outputs = decode(message).outputs
            for output in outputs:
                self.loads.written(client_id, output)
                if output.is_last:
                    self._end_request(client_id, output.number)
            stream.put(outputs)

    def _end_request(self, client_id: str, number: int) -> None:
        self._open.pop((client_id, number), None)
        self._close_shared((client_id, number))
        self.loads.ended(client_id, number)
        self._streams.tell_loads_soon()

    def _give_up_call(self, number: int, name: str) -> None:
        self._answer(number, None, TimeoutError(f"the engine has not answered {name} within {ANSWER_S:.0f} s"))

    def _answer(self, number: int, result: Any, error: Exception | None) -> None:
        future = self._calls.pop(number, None)
        if future is None or future.done():  # the result came after the timeout, or the caller was cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    async def _ask(self, terms: bytes) -> None:
        needs, problem = None, None
        try:
            needs = await self._ask_drafter(terms)
        except Exception as error:
            problem = portable(error)
        if self.failure is None:
            self._send((ToEngine.NEEDS, needs, problem))
