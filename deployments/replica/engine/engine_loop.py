"""The loop that runs an engine's rounds and handles the replica's messages, without Ray."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from wingbeat.cluster.channels.link import Link
from wingbeat.cluster.channels.pulse import Work
from wingbeat.deployments.fleet.wire import Verdict, WireRequest, received
from wingbeat.deployments.parts import first_result
from wingbeat.deployments.replica.engine.engine_messages import ToEngine, ToReplica, name_of, portable
from wingbeat.deployments.replica.engine.engine_setup import ServedEngine, ServedGrammars
from wingbeat.deployments.replica.router_stream import Outbox
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.scheduling.maskers import no_compiler
from wingbeat.runtime.scheduling.request import Request, RequestOutput

if TYPE_CHECKING:
    from wingbeat.runtime.kv.block_hashes import CacheLog

logger = logging.getLogger(__name__)
NUM_COMPILING = 2
"""Number of grammars that are compiled at the same time. More than 1, so that a slow grammar does not delay the next
grammar.
"""
IDLE_CHECK_S = 1.0
"""Seconds without work after which an engine checks once that all KV blocks have been freed."""
CLOGGED_S = 5e-3
"""Seconds between two attempts to write to a full ring buffer while no rounds run."""
LAST_WORDS_S = 2.0
"""Maximum seconds that an ending engine waits until its final messages are written. If the ring buffer to the replica
is full, the messages can be written only after the replica has read earlier messages.
"""
TELL_CACHED_S = 0.05
"""Minimum seconds between two messages about changes of the prefix cache while rounds run."""


class EngineLoop:
    """Runs rounds while there are unfinished requests, else sleeps; handles the replica's messages between two rounds.

    Args:
        calls: object whose methods the replica calls by name.
        grammars: compiles grammars of requests; the loop closes this object at its end.
        cache_log: log of changes of the engine's prefix cache; with None, no changes are sent.
        take_own: function that receives the outputs of requests that were made by the engine itself and not by a
            router.
    """

    def __init__(
        self,
        engine: ServedEngine,
        link: Link,
        calls: object,
        stream_interval_s: float = 0.02,
        grammars: ServedGrammars | None = None,
        cache_log: "CacheLog | None" = None,
        take_own: Callable[[RequestOutput], None] = lambda output: None,
    ) -> None:
        self._engine = engine
        self._link = link
        self._pulse = link.pulse
        engine.tell_round = self._pulse.sized
        self._calls = calls
        self._stream_interval_s = stream_interval_s
        self._take_own = take_own
        self._from_threads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Functions that other threads have queued for the engine's thread, such as handling a compiled grammar."""
        self._outboxes: dict[str, Outbox] = {}
        self._owners: dict[str, tuple[str, int]] = {}
        self._started: set[str] = set()
        self._check_at: float | None = None
        self._stopping = False
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="wingbeat-grammars")
        self._grammars = grammars
        self._cache_log = cache_log
        self._tell_cached_at = 0.0
        self._handlers: dict[str, Callable[..., None]] = {
            ToEngine.SUBMIT: self._add,
            ToEngine.ABORT: self._abort_numbers,
            ToEngine.WITHDRAW: self._withdraw,
            ToEngine.DISCONNECT: self._drop_client,
            ToEngine.CALL: self._call,
            ToEngine.STOP: self.stop,
        }

    def run(self) -> bool:
        """Run until the engine is stopped or breaks. Returns True if the engine was stopped, False if it broke.

        The method must be called in the thread that has loaded the engine. Before `run` returns, the loop sends the
        last outputs and the verdicts on unfinished requests to the replica; see `_end`.
        """
        if self._grammars is not None:
            threading.Thread(target=self._warm_grammars, name="wingbeat-grammar-start", daemon=True).start()
        try:
            while not self._take_messages():
                if self._engine.has_unfinished_requests():
                    self._pulse.begin(Work.ROUND)
                    self._deliver(self._engine.step())
                else:
                    self._wait_for_work()
            self._end("the engine was stopped", returned=list(self._owners))
        except RoundFailed as error:
            logger.exception("The engine failed")
            self._end(f"the engine failed: {error}", error.suspects, error.queued)
        except Exception as error:
            logger.exception("The engine failed")
            self._end(f"the engine failed: {type(error).__name__}: {error}")
        return self._stopping

    def stop(self) -> None:
        """End the loop after the running round; callable from the engine's thread and from signal handlers."""
        self._stopping = True
        self._link.wake()

    def fail(self, reason: str) -> None:
        """Make the loop fail between two rounds as if the engine had broken; callable from any thread."""

        def fail_now() -> None:
            raise RuntimeError(reason)

        self._do_soon(fail_now)

    def _end(self, reason: str, suspects: Iterable[str] = (), returned: Iterable[str] = ()) -> None:
        """Send final verdicts: requests in `suspects` may have broken the engine, and requests in `returned` are given
        back.

        No verdict is sent for other requests; their routers learn only that the engine is gone.
        """
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()
        suspects = list(suspects)
        blame = Verdict.FAILED if len(suspects) == 1 else Verdict.SUSPECTED
        for verdict, request_ids in ((blame, suspects), (Verdict.RETURNED, returned)):
            for request_id in request_ids:
                client_id, number = self._owners.get(request_id, (None, 0))
                if client_id in self._outboxes:
                    self._outboxes[client_id].give_up(number, verdict, f"request {request_id}: {reason}")
        now = time.monotonic()
        self._link.send((ToReplica.OUTPUTS, {client: outbox.take(now) for client, outbox in self._outboxes.items()}))
        self._link.send((ToReplica.ENDED, reason))
        while self._link.clogged and time.monotonic() - now < LAST_WORDS_S:
            time.sleep(CLOGGED_S)
            self._link.flush()

    def _take_messages(self) -> bool:
        """Handle all waiting messages. Returns whether the engine shall stop."""
        for kind, *arguments in self._link.receive():
            self._pulse.begin(Work.CALL if kind == ToEngine.CALL else Work.MESSAGE, ())
            self._handlers[kind](*arguments)
        with contextlib.suppress(queue.Empty):
            while not self._from_threads.empty():
                self._pulse.begin(Work.MESSAGE, ())
                self._from_threads.get_nowait()()
        return self._stopping

    def _wait_for_work(self) -> None:
        now = time.monotonic()
        self._flush(now, idle=True)
        wait_s = None if self._check_at is None else max(0.0, self._check_at - now)
        if self._link.clogged:
            wait_s = CLOGGED_S
        elif wait_s == 0.0:
            self._engine.check_integrity()
            self._check_at = wait_s = None
        self._pulse.end()
        # The wait needs no limit, because the operating system kills this process if its replica ends for whatever
        # reason (`die_with_parent`).
        self._link.wait(wait_s)

    def _flush(self, now: float, *, idle: bool = False) -> None:
        """Send all due outputs in one message.

        While the ring is full, outputs stay in the outboxes, where later outputs of a request are merged with them.
        """
        self._link.flush()
        if self._link.clogged:
            return
        due = {client: box.take(now) for client, box in self._outboxes.items() if box.due(now, idle=idle)}
        # Cache changes are sent before outputs: when a router gets an output and sends a request that continues the
        # output's text, the router already knows that the prefix is cached.
        if self._cache_log is not None and (idle or now >= self._tell_cached_at):
            self._tell_cached_at = now + TELL_CACHED_S
            if (changes := self._cache_log.drain()) is not None:
                self._link.send((ToReplica.CACHED, changes))
        if due:
            self._link.send((ToReplica.OUTPUTS, due))

    def _call(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Run a method of `calls` for the replica and send its result or its exception; an exception does not end the
        loop.

        If the method returns a future, the future's outcome is sent once it is done.
        """
        result, problem = None, None
        try:
            result = getattr(self._calls, name)(*arguments)
        except Exception as error:
            problem = portable(error)
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._do_soon(lambda: self._call_done(number, done)))
            return
        self._link.send((ToReplica.RESULT, number, result, problem))

    def _call_done(self, number: int, done: "Future[Any]") -> None:
        error = done.exception()
        result, problem = (done.result(), None) if error is None else (None, portable(error))
        self._link.send((ToReplica.RESULT, number, result, problem))

    def _do_soon(self, work: Callable[[], None]) -> None:
        """Queue a function that the engine's thread runs between two rounds; callable from any thread."""
        self._from_threads.put(work)
        self._link.wake()

    def _add(self, client_id: str, requests: Iterable[WireRequest]) -> None:
        if client_id not in self._outboxes:
            self._outboxes[client_id] = Outbox(self._stream_interval_s)
        for one in requests:
            self._add_one(client_id, one, self._outboxes[client_id])
        self._flush(time.monotonic())

    def _add_one(self, client_id: str, one: WireRequest, outbox: Outbox) -> None:
        """Add one request to the engine; an error is reported to the request's client as a verdict."""
        number, request_id = one.number, name_of(client_id, one.number)
        if request_id in self._owners:
            logger.warning("Request %s was submitted twice: it runs once", request_id)
            return
        with self._refusing(request_id, number, outbox):
            self._pulse.begin(Work.MESSAGE, (request_id,))
            request = received(one.request if one.shared is None else first_result("attach_spans", one), request_id)
            self._owners[request_id] = (client_id, number)
            if request.params.grammar is None:
                self._engine.add_request(request)
            else:
                self._compile(request, number, outbox)

    def _compile(self, request: Request, number: int, outbox: Outbox) -> None:
        """Compile the request's grammar on another thread, then queue the request."""
        if self._grammars is None:
            raise no_compiler(request.params.grammar)

        def queue_it(grammar: Future[Any]) -> None:
            self._do_soon(lambda: self._add_compiled(request, grammar, number, outbox))

        self._compiling.submit(self._compiled, request).add_done_callback(queue_it)

    def _compiled(self, request: Request) -> Any:
        # A grammar whose request was aborted meanwhile is not compiled, so that other requests do not wait for it.
        return self._grammars.compile(request.params.grammar) if request.request_id in self._owners else None

    def _warm_grammars(self) -> None:
        """Prepare the compiler for the first grammar, in parallel to the rounds."""
        try:
            self._grammars.warm()
        except Exception:
            logger.exception("The process that tries grammars out cannot be started; the first grammar tries again")

    def _add_compiled(self, request: Request, grammar: "Future[Any]", number: int, outbox: Outbox) -> None:
        if request.request_id not in self._owners:
            return
        try:
            with self._refusing(request.request_id, number, outbox):
                self._pulse.begin(Work.MESSAGE, (request.request_id,))
                self._engine.add_request(request, grammar.result())
        finally:
            self._flush(time.monotonic())

    @contextlib.contextmanager
    def _refusing(self, request_id: str, number: int, outbox: Outbox) -> Iterator[None]:
        """Context manager that turns exceptions into a verdict for the request's client."""
        try:
            yield
        except ValueError as error:
            self._owners.pop(request_id, None)
            outbox.give_up(number, Verdict.REFUSED, str(error))
        except Exception as error:
            self._owners.pop(request_id, None)
            logger.exception("Request %s cannot be taken", request_id)
            outbox.give_up(number, Verdict.FAILED, f"request {request_id}: {type(error).__name__}: {error}")

    def _abort_numbers(self, client_id: str, numbers: Iterable[int]) -> None:
        self._abort([name_of(client_id, number) for number in numbers])

    def _withdraw(self, client_id: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            request_id = name_of(client_id, number)
            if request_id in self._owners and self._engine.is_waiting(request_id):
                self._abort([request_id])
                self._outboxes[client_id].give_up(number, Verdict.WITHDRAWN, "its router has withdrawn it")
        self._flush(time.monotonic())

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._owners.pop(request_id, None) is not None:
                self._started.discard(request_id)
                self._engine.abort_request(request_id)

    def _drop_client(self, client_id: str) -> None:
        self._outboxes.pop(client_id, None)
        self._abort([request_id for request_id, owner in self._owners.items() if owner[0] == client_id])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                self._take_own(output)
                continue
            client_id, number = owner
            finished = output.finish_reason is not None
            urgent = finished or output.request_id not in self._started
            self._outboxes[client_id].put(number, output, urgent=urgent)
            if finished:
                del self._owners[output.request_id]
                self._started.discard(output.request_id)
            elif urgent:
                self._started.add(output.request_id)
        now = time.monotonic()
        self._check_at = now + IDLE_CHECK_S
        self._flush(now)
