"""A router's pool of a model's engines: distributes requests, streams outputs, resumes requests of lost engines."""

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
"""Number of engines in a row that may die while they run a request. After so many deaths the request must run alone, so
that a request that breaks engines cannot end the whole fleet. A request that a dying engine has named as a suspect must
run alone at once, in the next engine.
"""
RECONNECT_S = 0.5
"""Seconds before a lost connection to a live engine is opened again."""
DRAIN_POLL_S = 0.05
"""Seconds between checks whether the running requests have ended."""
SHUTTING_DOWN = "The server is shutting down."


class EnginePool:
    """All engines that serve one model, with one multiplexed connection to each.

    Args:
        max_num_seqs: requests that one engine runs at once; used until an engine has reported its own number.
        max_queued_requests: requests that may wait, over all engines and routers, in addition to the requests that the
            engines run.
        engine_wait_s: maximum seconds that a request waits if there is no engine; meanwhile Serve is made to start an
            engine.
        may_sleep: whether autoscaling may remove all replicas while there are no requests.
        grace_s: seconds that running requests have to end in an engine that is being removed, before they move to other
            engines.
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
        """Number of places that this router has reserved and not released."""
        self._token_rate = TokenRate()
        self._answers = AnswerLength()
        self._info: ModelInfo | None = None
        self.every_engine = EveryEngine(source.call, self._open_engines)
        self.names = Names()
        self.engine_ids: frozenset[str] = frozenset()
        """Ids of all live engines, including engines that accept no requests."""
        self.connections: dict[str, EngineConnection] = {}
        """Connections by engine id."""
        self._retired: set[EngineConnection] = set()
        self._unsubscribe: Callable[[], None] | None = None
        self._closed = False
        self._draining = False

    async def start(self) -> None:
        """Waits for the first engine, stores the description of its model, and connects to all engines."""
        event_loop = asyncio.get_running_loop()
        self._info = await self._source.describe()
        self.variants.merge(CatalogEntry(variant.name, 0, variant) for variant in self._info.variants)
        self._unsubscribe = self._source.subscribe(
            lambda engine_ids: event_loop.call_soon_threadsafe(self._update, engine_ids)
        )

    def limit(self, max_queued_requests: int, engine_wait_s: float) -> None:
        """Changes the limits of admission; requests that already wait keep their deadlines."""
        self._max_queued_requests, self._engine_wait_s = max_queued_requests, engine_wait_s

    async def close(self) -> None:
        """Closes every connection; running requests end with EngineUnavailable."""
        self._closed = True
        self._wait.end()
        if self._unsubscribe is not None:
            self._unsubscribe()
        connections = [*self.connections.values(), *self._retired]
        await asyncio.gather(*(connection.close() for connection in connections))

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until running requests have ended.

        Requests that still run at the timeout end with EngineUnavailable.
        """
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
        """Description of the model, which is the same for all engines.

        Raises:
            EngineUnavailable: no engine has been reached yet.
        """
        if self._info is None:
            raise EngineUnavailable("No engine has started yet.")
        return self._info

    @property
    def variants(self) -> Catalog[Variant]:
        """Catalog of the model's variants, which requests may name."""
        return self.names.catalogs[VARIANTS]

    def healthy(self) -> bool:
        """Returns True if at least one engine accepts requests and makes progress, or if a request would make Serve
        start an engine.
        """
        sleeps = self._may_sleep and not self.engine_ids
        return not self._draining and (sleeps or any(not load.stalled for load in self.loads()))

    def loads(self) -> list[EngineLoad]:
        """Returns the load of each engine that accepts requests, summed over all routers."""
        return [
            EngineLoad(engine_id, c.outstanding_tokens, c.num_requests + c.other_requests, c.stalled)
            for engine_id, c in self.connections.items()
            if c.open
        ]

    @property
    def max_num_seqs(self) -> int:
        """Number of requests that one engine runs at once."""
        return (self._info and self._info.max_num_seqs) or self._max_num_seqs

    @property
    def max_requests(self) -> int:
        """Maximum number of choices of one HTTP request: the number of requests that one engine runs at once plus the
        length of the queue.
        """
        return self.max_num_seqs + self._max_queued_requests

    def admit(self, num_requests: int) -> Reservation:
        """Reserves places for all of `num_requests` requests, or for none.

        Raises:
            EngineOverloaded: there are not enough places now.
            EngineUnavailable: there is no engine and requests do not wait for one, or the server is shutting down.
        """
        if self._draining:
            raise EngineUnavailable(SHUTTING_DOWN)
        engines = [connection for connection in self.connections.values() if connection.open]
        if not engines and not self._engine_wait_s:
            raise EngineUnavailable(retry_after_s=self._retry_after_s(1))
        # Places belong to the whole fleet, so the requests of all routers are counted.
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
        """Runs an admitted request; yields outputs with one or more tokens as the tokens arrive.

        The last output carries finish_reason, metrics and num_cached_tokens; an earlier output may carry the metrics so
        far. Closing the generator early (aclose, cancellation) aborts the request and frees its blocks.

        If the engine dies, another engine continues from the tokens so far. The resulting text is the same as without
        the failure, because sampling noise is keyed by seed and position. An engine that dies by an exception reports
        either the one request that caused it, which is not retried, or several suspected requests. If an engine
        vanishes without a report, every request that it ran is suspected. A request that has received more than
        `ALONE_TOKENS` tokens from an engine is no longer suspected of having broken earlier engines.

        While new weights are pushed, a request continues only on engines that still serve the weights with which it
        began.

        Args:
            session_id: id that the requests of a conversation share. Among equally loaded engines, requests with equal
                ids go to the same engine.

        Raises:
            EngineUnavailable: no engine is left to run the request.
            RequestFailed: processing the request raised an exception, or the engine broke in the request's first round.
            EnginesEnded: the engine died while the request ran alone; earlier engines had died while they ran the
                request, too.
            RequestRefused: the engine refused the request.
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
        """Returns the connection for a request, and the number of the request's tokens that the engine has cached.

        Args:
            weights: `EngineConnection.weights` of the engine on which the request began; None if the request has not
                begun.

        Raises:
            EngineUnavailable: there is no engine, and none became available within `engine_wait_s`.
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
        """Returns the loads of the engines that serve these weights; with None, of all engines."""
        if weights is None:
            return self.loads()
        return [load for load in self.loads() if self.connections[load.engine_id].weights == weights]

    def _hand_over(self, connection: EngineConnection) -> None:
        if any(other.open for other in self.connections.values()):
            connection.withdraw(connection.waiting())

    def _move_on(self, connection: EngineConnection) -> None:
        """Moves the requests of a removed engine to other engines, if there are other engines; called after the grace
        period.
        """
        if connection in self._retired and any(other.open for other in self.connections.values()):
            connection.give_up_all(f"engine {connection.engine_id} is being stopped")

    def _prompt_blocks(self, request: Request) -> PromptBlocks:
        # A prompt whose log-probabilities are requested is always computed, even if its keys and values are cached, so
        # it has no blocks to match.
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
            # Serve drains a replica before it ends the replica, so that running requests can finish.
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
            # The oldest requests of an engine have slots or will get the next free slots. Requests beyond the number of
            # slots are withdrawn, so that the new engine can run them.
            num_waiting = connection.num_requests + connection.other_requests - self.max_num_seqs
            if num_waiting > 0:
                connection.withdraw(connection.waiting()[-num_waiting:])

    def _on_end(self, connection: EngineConnection) -> None:
        self._retired.discard(connection)
        if self.connections.get(connection.engine_id) is connection:
            del self.connections[connection.engine_id]
            asyncio.get_running_loop().call_later(RECONNECT_S, self._connect, connection.engine_id)


def _for_caller(output: RequestOutput, request: Request, source: EngineConnection) -> RequestOutput:
    """Returns the output with the caller's request id, the engine's id and the digest of the engine's weights.

    The number of cached tokens is at most the prompt's length, because output tokens of an earlier engine, which the
    engine may also have cached, do not count.
    """
    num_cached = min(output.num_cached_tokens, len(request.prompt_token_ids))
    return output._replace(
        request_id=request.request_id,
        num_cached_tokens=num_cached,
        engine_id=source.engine_id,
        weights=source.weights,
    )
