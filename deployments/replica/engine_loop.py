"""The thread that runs an engine's rounds, and the thread-safe ways in and out of it; knows nothing of Ray."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from wingbeat.deployments.fleet.wire import Verdict, WireRequest, unpack_request
from wingbeat.deployments.replica.outbox import Outbox, RouterGone
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.scheduling.request import Request, RequestOutput

if TYPE_CHECKING:
    from wingbeat.runtime.grammar.compiler import Grammars

logger = logging.getLogger(__name__)
T = TypeVar("T")
NUM_COMPILING = 2
"""Grammars compiled at once, so that a slow one does not hold up the next."""
IDLE_CHECK_S = 1.0
"""An engine without work for this long proves that it has given every block back."""


class EngineFailed(RuntimeError):
    """The engine's thread has died; its requests are lost and its process has to be replaced."""


class ServedEngine(Protocol):
    """What the loop and the verifier need of an engine; all calls come from the loop's thread.

    `step` raises RoundFailed where it knows which requests may have broken the engine.
    """

    drafter_state: str
    """`none`, `attached` or `lost`."""
    grammars: "Grammars | None"
    """Compiles what requests give as their grammar, on any thread."""

    def add_request(self, request: Request, grammar: Any = None) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def stats(self) -> Any: ...
    def check_integrity(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def attach_drafter(self, end: VerifierEnd) -> None: ...
    def detach_drafter(self) -> None: ...


class _Call(Generic[T]):
    """A function to run on the engine and the future its result goes to."""

    def __init__(self, engine: ServedEngine, function: Callable[[ServedEngine], T]) -> None:
        self.future: Future[T] = Future()
        self._engine = engine
        self._function = function

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function(self._engine))
        except Exception as error:
            self.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Submission:
    """Requests on their way from one client to the engine."""

    def __init__(self, loop: "EngineLoop", client_id: str, requests: Iterable[WireRequest]) -> None:
        self.client_id = client_id
        self.by_number = {packed[0]: packed for packed in requests}
        self._loop = loop

    def __call__(self) -> None:
        self._loop._add(self)


class EngineLoop:
    """Runs rounds while there is work and sleeps otherwise; requests and aborts join between two rounds."""

    def __init__(
        self, engine: ServedEngine, stream_interval_s: float = 0.02, trial: GrammarTrial | None = None
    ) -> None:
        """`trial` tries grammars out before they are compiled; it is closed with the loop."""
        self._engine = engine
        self._stream_interval_s = stream_interval_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outboxes: dict[str, Outbox] = {}
        self._owners: dict[str, tuple[str, int]] = {}
        self._started: set[str] = set()
        self._check_at: float | None = None
        self._stopping = False
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="wingbeat-grammars")
        self._trial = trial
        self.failure: EngineFailed | None = None
        self._thread = threading.Thread(target=self._run, name="wingbeat-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the round it is in; unfinished requests are dropped."""
        self._post(self._stop)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()
        self._thread.join(timeout_s)

    @property
    def num_requests(self) -> int:
        """Requests submitted and not finished."""
        return len(self._owners)

    def connect(self, client_id: str) -> Outbox:
        """Open a client's outbox; called on the event loop that will take from it.

        Raises:
            EngineFailed: the engine is gone.
        """
        self.check_alive()
        outbox = self._outboxes[client_id] = Outbox(self._stream_interval_s)
        return outbox

    def disconnect(self, client_id: str) -> None:
        """Close a client's outbox and abort whatever it still runs; harmless when repeated."""
        self._post(lambda: self._drop_client(client_id))

    def submit(self, client_id: str, requests: Iterable[WireRequest]) -> None:
        """Hand over requests; refusals arrive in the outbox.

        Raises:
            RouterGone: the client is not connected.
            EngineFailed: the engine is gone.
            TypeError, IndexError: something among the requests has no number that an answer could go to.
        """
        self.check_alive()
        if client_id not in self._outboxes:
            raise RouterGone(f"client {client_id} is not connected to this engine")
        self._post(_Submission(self, client_id, requests))

    def abort(self, client_id: str, numbers: Iterable[int]) -> None:
        """Stop requests and free their blocks; unknown or finished ones are ignored."""
        request_ids = [_request_id(client_id, number) for number in numbers]
        self._post(lambda: self._abort(request_ids))

    def call(self, function: Callable[[ServedEngine], T]) -> Future[T]:
        """Run a function on the engine between two rounds; its exception goes to the future, not to the loop."""
        call = _Call(self._engine, function)
        self._post(call)
        return call.future

    def check_alive(self) -> None:
        """Raises EngineFailed once the thread has died."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._drain_inbox():
                if self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
                else:
                    self._wait_for_work()
            self._end(EngineFailed("the engine was stopped"), returned=list(self._owners))
        except RoundFailed as error:
            logger.exception("The engine failed")
            self._end(EngineFailed(f"the engine failed: {error}"), error.suspects, error.queued)
        except Exception as error:
            logger.exception("The engine failed")
            self._end(EngineFailed(f"the engine failed: {type(error).__name__}: {error}"))

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)
        if self.failure is not None:
            self._refuse_inbox(self.failure)

    def _end(self, error: EngineFailed, suspects: Iterable[str] = (), returned: Iterable[str] = ()) -> None:
        """The engine's last words: which requests must not be tried elsewhere, and which it had not taken up.

        Of the others a router knows no more than that their engine is gone.
        """
        self.failure = error
        self._refuse_inbox(error)
        for verdict, request_ids in ((Verdict.FAILED, suspects), (Verdict.RETURNED, returned)):
            for request_id in request_ids:
                client_id, number = self._owners.get(request_id, (None, 0))
                if client_id in self._outboxes:
                    self._outboxes[client_id].give_up(number, verdict, f"request {request_id}: {error}")
        for outbox in list(self._outboxes.values()):
            outbox.end(error)

    def _refuse_inbox(self, error: EngineFailed) -> None:
        """Nobody runs commands any more, but whoever waits for an answer must get one."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if isinstance(command, _Call):
                    command.fail(error)
                elif isinstance(command, _Submission) and command.client_id in self._outboxes:
                    for number in command.by_number:
                        self._outboxes[command.client_id].give_up(number, Verdict.RETURNED, str(error))

    def _drain_inbox(self) -> bool:
        """Run every command that waits; returns whether one of them was to stop."""
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                self._inbox.get_nowait()()
        return self._stopping

    def _wait_for_work(self) -> None:
        now = time.monotonic()
        for outbox in list(self._outboxes.values()):
            outbox.flush(now, idle=True)
        try:
            self._inbox.get(timeout=None if self._check_at is None else max(0.0, self._check_at - now))()
        except queue.Empty:
            self._engine.check_integrity()
            self._check_at = None

    def _add(self, submission: _Submission) -> None:
        outbox = self._outboxes.get(submission.client_id)
        if outbox is None:
            return
        for number, packed in submission.by_number.items():
            self._add_one(submission.client_id, number, packed, outbox)
        outbox.flush(time.monotonic())

    def _add_one(self, client_id: str, number: int, packed: WireRequest, outbox: Outbox) -> None:
        """Hand one request to the engine; whatever that raises is told to its client and is nobody else's matter."""
        request_id = _request_id(client_id, number)
        if request_id in self._owners:
            logger.warning("Request %s was submitted twice: it runs once", request_id)
            return
        with self._refusing(request_id, number, outbox):
            request = unpack_request(packed, request_id)
            self._owners[request_id] = (client_id, number)
            if request.params.grammar is None:
                self._engine.add_request(request)
            else:
                self._compile(request, number, outbox)

    def _compile(self, request: Request, number: int, outbox: Outbox) -> None:
        """Have the request's grammar compiled on another thread; it is queued once that is done."""
        if self._engine.grammars is None:
            raise ValueError("structured_outputs is not served here: the model has no tokenizer")

        def queue_it(grammar: Future[Any]) -> None:
            self._post(lambda: self._add_compiled(request, grammar, number, outbox))

        self._compiling.submit(self._compiled, request).add_done_callback(queue_it)

    def _compiled(self, request: Request) -> Any:
        # One that was aborted meanwhile must not keep others waiting.
        if request.request_id not in self._owners:
            return None
        if self._trial is not None:
            self._trial.check(request.params.grammar)
        return self._engine.grammars.compile(request.params.grammar)

    def _add_compiled(self, request: Request, grammar: "Future[Any]", number: int, outbox: Outbox) -> None:
        if request.request_id not in self._owners:
            return
        try:
            with self._refusing(request.request_id, number, outbox):
                self._engine.add_request(request, grammar.result())
        finally:
            outbox.flush(time.monotonic())

    @contextlib.contextmanager
    def _refusing(self, request_id: str, number: int, outbox: Outbox) -> Iterator[None]:
        """What the block raises is told to the request's client."""
        try:
            yield
        except ValueError as error:
            self._owners.pop(request_id, None)
            outbox.give_up(number, Verdict.REFUSED, str(error))
        except Exception as error:
            self._owners.pop(request_id, None)
            logger.exception("Request %s cannot be taken", request_id)
            outbox.give_up(number, Verdict.FAILED, f"request {request_id}: {type(error).__name__}: {error}")

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._owners.pop(request_id, None) is not None:
                self._started.discard(request_id)
                self._engine.abort_request(request_id)

    def _drop_client(self, client_id: str) -> None:
        outbox = self._outboxes.pop(client_id, None)
        self._abort([request_id for request_id, owner in self._owners.items() if owner[0] == client_id])
        if outbox is not None:
            outbox.end(RouterGone(f"client {client_id} was disconnected"))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
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
        for outbox in list(self._outboxes.values()):
            outbox.flush(now)

    def _stop(self) -> None:
        self._stopping = True


def _request_id(client_id: str, number: int) -> str:
    """Unique in the engine: two routers, or two connections of one router, count independently."""
    return f"{client_id}:{number}"
