"""Figures that the router measures as a client of the engines: latencies and finish reasons of requests for each
engine.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from starlette.types import Scope

from wingbeat.deployments.api.answers.generation import ChoiceDelta
from wingbeat.deployments.api.guard import RequestWatcher
from wingbeat.deployments.request_context import RequestContext, current
from wingbeat.runtime.metrics import REQUEST_S, Histogram
from wingbeat.runtime.scheduling.request import Request

# Bounds of histograms, which are vLLM's.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
CHOICES = (1, 2, 5, 10, 20)
ENDS = ("stop", "length", "abort", "error")
"""vLLM's finish reasons. "abort": the client disconnected. "error": the client got no tokens, or not all tokens."""


def one_two_five(limit: int) -> tuple[int, ...]:
    """Returns the bounds 1, 2, 5, 10, 20, 50 and so on up to `limit`, for numbers of tokens."""
    powers = (10**exponent for exponent in range(len(str(limit))))
    return tuple(bound for power in powers for bound in (power, 2 * power, 5 * power) if bound <= limit)


@dataclass
class ClientFigures:
    """Figures of one router's requests to one engine.

    A request that moved to another engine counts for the engine that continued it.

    Args:
        max_model_len: upper bound of the buckets in histograms of numbers of tokens.
    """

    max_model_len: int
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    """Seconds from the request's arrival in the router to its first token."""
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(PER_TOKEN_S))
    """Seconds between successive tokens: if k tokens arrive together, they count as k values, each 1/k of the time
    since the tokens before.
    """
    time_per_output_token_s: Histogram = field(default_factory=lambda: Histogram(PER_TOKEN_S))
    """Mean seconds per token after the first token; each request gives one value."""
    e2e_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    prompt_tokens: Histogram | None = None
    generation_tokens: Histogram | None = None
    span_tokens: dict[str, int] = field(default_factory=dict)
    """Number of prompt tokens in media spans, by the span's kind."""
    max_tokens: Histogram | None = None
    """Histogram of the values of `max_tokens`."""
    num_choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))
    """Histogram of the values of `n`, with one value for each prompt."""
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))

    def __post_init__(self) -> None:
        bounds = one_two_five(self.max_model_len)
        self.prompt_tokens = self.prompt_tokens or Histogram(bounds)
        self.generation_tokens = self.generation_tokens or Histogram(bounds)
        self.max_tokens = self.max_tokens or Histogram(bounds)


class ClientWatch:
    """Context manager that measures one choice.

    If the context ends without a finish reason, the choice counts as aborted; if it ends by an exception, as an error.

    Args:
        num_choices: `n` if this choice is the first of its prompt, else 0.
    """

    def __init__(self, clients: "RouterFigures", request: Request, max_model_len: int, num_choices: int = 0) -> None:
        self.request = request
        self._num_choices = num_choices
        self._clients = clients
        self._max_model_len = max_model_len
        self._context = current()
        self.arrived_at = time.perf_counter() if self._context is None else self._context.arrived_at
        self.first_token_at: float | None = None
        self.last_token_at = self.arrived_at
        self.num_tokens = 0
        self.queue_s = 0.0
        self.engine_id = ""
        self.end: str | None = None
        """Item of `ENDS`, set when the last tokens have arrived; None before."""
        self._engine: ClientFigures | None = None

    def took(self, num_tokens: int, engine_id: str, queue_s: float) -> None:
        """Records tokens that arrived from an engine; called once per message."""
        self.queue_s = self.queue_s or queue_s
        self._engine, self.engine_id = self._clients.of_engine(engine_id, self._max_model_len), engine_id
        if not num_tokens:
            return
        now, engine = time.perf_counter(), self._engine
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at = now
            engine.time_to_first_token_s.observe(now - self.arrived_at)
            engine.inter_token_s.observe(0.0, num_tokens - 1)
        else:
            engine.inter_token_s.observe((now - self.last_token_at) / num_tokens, num_tokens)
        self.last_token_at = now
        self.num_tokens += num_tokens

    def __enter__(self) -> "ClientWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.end is None:
            self.end = "error" if isinstance(error, Exception) else "abort"
        now = time.perf_counter()
        if self._engine is not None:
            self._count(self._engine, now)
        if self._context is not None and self._context.span is not None:
            self._context.span.choice(self, now)

    def _count(self, engine: ClientFigures, now: float) -> None:
        engine.ended[self.end] += 1
        engine.e2e_s.observe(now - self.arrived_at)
        engine.prompt_tokens.observe(len(self.request.prompt_token_ids))
        for span in self.request.spans:
            engine.span_tokens[span.kind] = engine.span_tokens.get(span.kind, 0) + span.length
        engine.generation_tokens.observe(self.num_tokens)
        engine.max_tokens.observe(self.request.params.max_tokens)
        if self._num_choices:
            engine.num_choices.observe(self._num_choices)
        if self.num_tokens > 1:
            engine.time_per_output_token_s.observe((self.last_token_at - self.first_token_at) / (self.num_tokens - 1))


class RouterFigures(RequestWatcher):
    """Figures of one router since its start. As a watcher of requests, the object counts HTTP answers.

    Args:
        router_id: id of the router.
        num_admitted: function that returns the current number of admitted choices, in engines and in the queue.
    """

    def __init__(self, router_id: str = "", num_admitted: Callable[[], int] = lambda: 0) -> None:
        self.router_id = router_id
        self.num_admitted = num_admitted
        self.num_reports = 0
        self.answers: dict[str, int] = {}
        """Number of HTTP answers for each status."""
        self._by_engine: dict[str, ClientFigures] = {}

    def watch(self, request: Request, max_model_len: int, num_choices: int = 0) -> ClientWatch:
        """Returns a context manager that measures a choice: `with figures.watch(request, ...) as watch`; see
        `ClientWatch`.
        """
        return ClientWatch(self, request, max_model_len, num_choices)

    def of_engine(self, engine_id: str, max_model_len: int) -> ClientFigures:
        """Returns the figures of requests to one engine."""
        if engine_id not in self._by_engine:
            self._by_engine[engine_id] = ClientFigures(max_model_len)
        return self._by_engine[engine_id]

    async def measured(
        self,
        deltas: AsyncGenerator[ChoiceDelta, None],
        request: Request,
        max_model_len: int,
        num_choices: int,
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields a choice's deltas and measures the choice."""
        with self.watch(request, max_model_len, num_choices) as watch:
            async with aclosing(deltas):
                async for delta in deltas:
                    watch.took(delta.num_tokens, delta.engine_id, delta.queue_s)
                    if delta.finish_reason is not None:
                        watch.end = str(delta.finish_reason)
                    yield delta

    def ended(self, scope: Scope, context: RequestContext) -> None:
        """Counts an HTTP answer by its status."""
        self.answers[str(context.status)] = self.answers.get(str(context.status), 0) + 1

    def report(self, engine_id: str) -> dict[str, Any]:
        """Returns this router's report for an engine.

        The engine stores the report, so that other routers can read it. A report contains sums since the router's
        start, so a lost or repeated report does no harm.
        """
        self.num_reports += 1
        clients = self._by_engine.get(engine_id)
        return {
            "router_id": self.router_id,
            "number": self.num_reports,
            "clients": None if clients is None else asdict(clients),
            "router": self.router_figures(),
        }

    def routers(self, engines: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the newest report of each router among the reports that the engines hold, and this router's figures.

        Args:
            engines: figures by engine id.
        """
        newest: dict[str, dict[str, Any]] = {}
        for figures in engines.values():
            for router_id, router in figures.get("routers", {}).items():
                if router["number"] > newest.get(router_id, {"number": -1})["number"]:
                    newest[router_id] = router
        newest[self.router_id] = self.router_figures()
        return newest

    def router_figures(self) -> dict[str, Any]:
        """Returns the figures of this router that do not belong to an engine."""
        return {"num_admitted": self.num_admitted(), "answers": dict(self.answers)}

    def forget_engines(self, live: frozenset[str]) -> None:
        """Removes the figures of engines that no longer exist."""
        for engine_id in self._by_engine.keys() - live:
            del self._by_engine[engine_id]
