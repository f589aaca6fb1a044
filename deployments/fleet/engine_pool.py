"""All engines of one model as a router sees them: spreads requests, streams outputs, continues what an engine lost."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from wingbeat.cluster.routing import (
    AnswerLength,
    EngineLoad,
    PromptBlocks,
    TokenRate,
    choose_engine,
    moving,
    num_missing_places,
    retry_after_s,
)
from wingbeat.deployments.fleet.admission import EngineWait, Reservation
from wingbeat.deployments.fleet.catalog import VARIANTS, Catalog, CatalogEntry, Names
from wingbeat.deployments.fleet.connection import EngineConnection, EngineTransport, PatientEngines
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.deployments.fleet.interface import (
    EngineOverloaded,
    EnginesEnded,
    EngineUnavailable,
    ModelInfo,
    RequestFailed,
)
from wingbeat.deployments.fleet.request_stream import EngineLost
from wingbeat.runtime.scheduling.prompt_spans import prefix_ids
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, Request, RequestOutput, Variant

logger = logging.getLogger(__name__)
MAX_UNEXPLAINED = 2
"""Engines that may die under a request, one after the other, until it runs alone: one that breaks whatever runs it must
not take the whole fleet down. Where it, or one of a few, has ended an engine for certain, it runs alone in the next."""
RECONNECT_S = 0.5
DRAIN_POLL_S = 0.05
SHUTTING_DOWN = "The server is shutting down."


class EnginePool:
    """All engines that serve one model, with one multiplexed connection to each.

    Args:
        max_num_seqs: requests that one engine runs, until the engines say how many these are.
        engine_wait_s: what a request waits for an engine where there is none; such requests are queued, and one is
            asked for.
        may_sleep: whether there being no replica at all is as it should be, as nobody has asked for anything.
        grace_s: what running requests have to end in an engine that is taken out; then they go on elsewhere.
    """

    def __init__(
        self,
        source: EngineTransport,
        *,
        max_num_seqs: int,
        max_queued_requests: int,
        engine_wait_s: float = 0.0,
        may_sleep: bool = False,
        grace_s: float = 30.0,
    ) -> None:
        self._source = source = PatientEngines(source)
        self._max_num_seqs = max_num_seqs
        self._max_queued_requests = max_queued_requests
        self._engine_wait_s = engine_wait_s
        self._may_sleep = may_sleep
        self._grace_s = grace_s
        self._wait = EngineWait(source.describe)
        self.num_admitted = 0
        """Places taken and not given back."""
        self._token_rate = TokenRate()
        self._answers = AnswerLength()
        self._info: ModelInfo | None = None
        self.every_engine = EveryEngine(source.call, self._open_engines)
        self.names = Names()
        self.engine_ids: frozenset[str] = frozenset()
        """The engines that are live, whether they take requests or not."""
        self.connections: dict[str, EngineConnection] = {}
        """By engine."""
        self._retired: set[EngineConnection] = set()
        self._unsubscribe: Callable[[], None] | None = None
        self._closed = False
        self._draining = False

    async def start(self) -> None:
        """Wait for the first engine, learn its model and connect."""
        event_loop = asyncio.get_running_loop()
        self._info = await self._source.describe()
        self.variants.merge(CatalogEntry(variant.name, 0, variant) for variant in self._info.variants)
        self._unsubscribe = self._source.subscribe(
            lambda engine_ids: event_loop.call_soon_threadsafe(self._update, engine_ids)
        )

    def limit(self, max_queued_requests: int, engine_wait_s: float) -> None:
        """Admit by other limits from now on; what waits already waits as it was told."""
        self._max_queued_requests, self._engine_wait_s = max_queued_requests, engine_wait_s

    async def close(self) -> None:
        """Close every connection; running requests end by EngineUnavailable."""
        self._closed = True
        self._wait.end()
        if self._unsubscribe is not None:
            self._unsubscribe()
        connections = [*self.connections.values(), *self._retired]
        await asyncio.gather(*(connection.close() for connection in connections))

    async def drain(self, timeout_s: float) -> None:
        """Take no further requests and wait for those that run; at the timeout the rest end by EngineUnavailable."""
        self._draining = True
        event_loop = asyncio.get_running_loop()
        deadline = event_loop.time() + timeout_s
        while (self._running() or self._wait.num_waiting) and event_loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self._closed = True
        self._wait.end()
        for connection in self._running():
            connection.fail_all(EngineUnavailable(SHUTTING_DOWN))

    def _running(self) -> list[EngineConnection]:
        return [c for c in (*self.connections.values(), *self._retired) if c.num_requests > 0]

    @property
    def info(self) -> ModelInfo:
        """The model every engine serves.

        Raises:
            EngineUnavailable: no engine has been reached yet.
        """
        if self._info is None:
            raise EngineUnavailable("No engine has started yet.")
        return self._info

    @property
    def variants(self) -> Catalog[Variant]:
        """Variants of the model that requests may name."""
        return self.names.catalogs[VARIANTS]

    def healthy(self) -> bool:
        """Whether some engine takes requests and makes progress, or will once it is asked."""
        sleeps = self._may_sleep and not self.engine_ids
        return not self._draining and (sleeps or any(not load.stalled for load in self.loads()))

    def loads(self) -> list[EngineLoad]:
        """The engines that take requests, with what all routers have outstanding there."""
        return [
            EngineLoad(engine_id, c.outstanding_tokens, c.num_requests + c.other_requests, c.stalled)
            for engine_id, c in self.connections.items()
            if c.open
        ]

    @property
    def max_num_seqs(self) -> int:
        """Requests that one engine runs."""
        return (self._info and self._info.max_num_seqs) or self._max_num_seqs

    @property
    def max_requests(self) -> int:
        """Requests that one engine runs and this router queues: more are never admitted together."""
        return self.max_num_seqs + self._max_queued_requests

    def admit(self, num_requests: int) -> Reservation:
        """Take places for requests that are to run together: all of them, or none.

        Raises:
            EngineOverloaded: there are not so many places now.
            EngineUnavailable: there is no engine and requests do not wait for one, or the server is shutting down.
        """
        if self._draining:
            raise EngineUnavailable(SHUTTING_DOWN)
        engines = [connection for connection in self.connections.values() if connection.open]
        if not engines and not self._engine_wait_s:
            raise EngineUnavailable(retry_after_s=self._retry_after_s(1))
        # Places are the fleet's, however many routers give them out.
        num_admitted = self.num_admitted + sum(connection.other_requests for connection in engines)
        missing = num_missing_places(
            num_requests, num_admitted, len(engines), self.max_num_seqs, self._max_queued_requests
        )
        if missing:
            raise EngineOverloaded(retry_after_s=self._retry_after_s(missing))
        if not self.num_admitted:
            self._token_rate.resume(time.monotonic())
        self.num_admitted += num_requests
        return Reservation(self, num_requests)

    async def generate(self, request: Request, session_id: str = "") -> AsyncGenerator[RequestOutput, None]:
        """Run a request that was admitted; yields its tokens as they arrive, several per output possible.

        The last output carries finish_reason, metrics and num_cached_tokens; an earlier one may carry the metrics
        so far. Closing the generator early (aclose, cancellation) aborts the request and frees its blocks.

        When the engine dies, another one continues from the tokens so far: noise is keyed by seed and position, so
        the text is the one the first engine would have written. An engine that dies by an exception names the request
        that has caused it, which is not tried again, or those that may have; one that just vanishes says nothing, so
        that every request it ran may have. Whatever outlives `ALONE_TOKENS` at an engine has not broken those before.

        A text goes on by the weights that it was begun by: while others are pushed, at engines that have them still.

        Args:
            session_id: what requests of one conversation have in common; where engines cost the same it keeps to one.

        Raises:
            EngineUnavailable: no engine is left to run it.
            RequestFailed: processing it raised, or its engine broke in its first round.
            EnginesEnded: its engine died while it ran alone there, because engines had died under it before.
            RequestRefused: the engine refused it.
        """
        emitted: list[int] = []
        num_lost, suspected, weights = 0, False, None
        while True:
            alone = suspected or num_lost >= MAX_UNEXPLAINED
            rest = replace(request, output_token_ids=(*request.output_token_ids, *emitted), alone=alone)
            connection, num_cached_tokens = await self._engine_for(rest, session_id, weights)
            stream = connection.submit(rest, num_cached_tokens)
            try:
                while True:
                    output = await stream.next()
                    emitted.extend(output.token_ids)
                    yield _for_caller(output, request, connection)
                    if output.finish_reason is not None:
                        self._answers.add(len(emitted))
                        return
            except EngineLost as error:
                weights = connection.weights if stream.begun else weights
                if stream.num_written > ALONE_TOKENS:
                    num_lost, suspected, alone = 0, False, False
                num_lost, suspected = num_lost + error.taken_up, suspected or error.suspected
                if alone and error.taken_up:
                    ended = EnginesEnded(num_lost, str(error))
                    logger.error("Request %s failed: %s", request.request_id, ended)
                    raise ended from None
                level = logging.WARNING if error.taken_up else logging.INFO
                logger.log(level, "Request %s goes to another engine: %s", request.request_id, error)
            except RequestFailed as error:
                logger.error("Request %s failed: %s", request.request_id, error)
                raise
            finally:
                connection.release(stream)

    def _open_engines(self) -> list[str]:
        return [engine_id for engine_id, connection in self.connections.items() if connection.open]

    async def _engine_for(self, request: Request, session_id: str, weights: str | None) -> tuple[EngineConnection, int]:
        """The connection for a request, and how many of its tokens the engine there has cached.

        Args:
            weights: of `EngineConnection.weights`, by which it was begun; None where it was not.

        Raises:
            EngineUnavailable: there is no engine, and none came in time.
        """
        prompt = self._prompt_blocks(request)

        def num_cached_tokens(engine_id: str) -> int:
            return self.connections[engine_id].index.num_cached_tokens(prompt)

        deadline = time.monotonic() + self._engine_wait_s
        while not (loads := moving(self._loads_of(weights))):
            if self._closed:
                raise EngineUnavailable(SHUTTING_DOWN)
            if time.monotonic() >= deadline:
                raise EngineUnavailable(retry_after_s=self._retry_after_s(1))
            await self._wait.until(deadline, ask=not self.engine_ids)
        engine_id = choose_engine(loads, prompt.num_tokens, num_cached_tokens, session_id)
        return self.connections[engine_id], num_cached_tokens(engine_id)

    def _loads_of(self, weights: str | None) -> list[EngineLoad]:
        """`loads` of the engines that may go on with a text of these weights; None: of all."""
        if weights is None:
            return self.loads()
        return [load for load in self.loads() if self.connections[load.engine_id].weights == weights]

    def _hand_over(self, connection: EngineConnection) -> None:
        if any(other.open for other in self.connections.values()):
            connection.withdraw(connection.waiting())

    def _move_on(self, connection: EngineConnection) -> None:
        """The time of an engine that was taken out is over, if there is another one."""
        if connection in self._retired and any(other.open for other in self.connections.values()):
            connection.give_up_all(f"engine {connection.engine_id} is being stopped")

    def _prompt_blocks(self, request: Request) -> PromptBlocks:
        # A prompt that is to be reported on is computed anew, wherever it is cached.
        block_size = self._info.block_size if request.params.prompt_logprobs is None else 0
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        if request.spans:
            token_ids = prefix_ids(token_ids, request.spans)
        return PromptBlocks(token_ids, block_size, request.params.cache_salt, request.variant_digest)

    def _retry_after_s(self, num_missing: int) -> int:
        connections = (*self.connections.values(), *self._retired)
        unwritten = sum(connection.unwritten_tokens for connection in connections)
        rate = self._token_rate.per_s(time.monotonic())
        return retry_after_s(num_missing, self.num_admitted, unwritten, rate)

    def _count(self, num_tokens: int) -> None:
        self._token_rate.add(num_tokens, time.monotonic())

    def _update(self, engine_ids: frozenset[str]) -> None:
        self.engine_ids = engine_ids
        for engine_id in engine_ids - self.connections.keys():
            self._connect(engine_id)
        for engine_id in self.connections.keys() - engine_ids:
            # Serve drains a replica before it ends it: what runs there may finish.
            connection = self.connections.pop(engine_id)
            self._retired.add(connection)
            connection.retire()
            self._hand_over(connection)
            asyncio.get_running_loop().call_later(self._grace_s, self._move_on, connection)

    def _connect(self, engine_id: str) -> None:
        if not self._closed and engine_id in self.engine_ids and engine_id not in self.connections:
            opened = partial(self._opened, engine_id)
            self.connections[engine_id] = EngineConnection(
                engine_id, self._source, self._on_end, self._count, opened, self._answers, self.names.merge
            )

    def _opened(self, engine_id: str) -> None:
        self._wait.over()
        self.every_engine.share(engine_id, self.names.changes())
        for connection in self._retired:
            self._hand_over(connection)
        for connection in self.connections.values():
            # The oldest requests have slots, or are next to get one: the others choose anew.
            num_waiting = connection.num_requests + connection.other_requests - self.max_num_seqs
            if num_waiting > 0:
                connection.withdraw(connection.waiting()[-num_waiting:])

    def _on_end(self, connection: EngineConnection) -> None:
        self._retired.discard(connection)
        if self.connections.get(connection.engine_id) is connection:
            del self.connections[connection.engine_id]
            asyncio.get_running_loop().call_later(RECONNECT_S, self._connect, connection.engine_id)


def _for_caller(output: RequestOutput, request: Request, source: EngineConnection) -> RequestOutput:
    """Under the caller's id, with what wrote it; a resumed request counts only its own prompt as cached."""
    num_cached = min(output.num_cached_tokens, len(request.prompt_token_ids))
    return output._replace(
        request_id=request.request_id,
        num_cached_tokens=num_cached,
        engine_id=source.engine_id,
        weights=source.weights,
    )
