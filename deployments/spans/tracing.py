"""OpenTelemetry spans of requests: one span for each HTTP request, and within this span one span for each choice.

OpenTelemetry's packages are optional and are imported only when a tracer is created.
"""

import importlib
import time
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.spans.settings import EXPORTER

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from wingbeat.deployments.client_metrics.client_figures import ClientWatch


def exporting_provider(endpoint: str, model_name: str) -> "TracerProvider":
    """Return a provider that sends spans to a collector over HTTP, in batches and from a separate thread.

    Args:
        endpoint: URL of the collector, such as http://localhost:4318/v1/traces.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "wingbeat", "gen_ai.request.model": model_name})
    provider = TracerProvider(resource=resource)
    exporter = importlib.import_module(EXPORTER).OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestTracer:
    """Begins the span of every request.

    Args:
        provider: destination of the spans.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("wingbeat")
        self._extract = TraceContextTextMapPropagator().extract
        # Requests are timed by a monotonic clock, but spans need the time of day, so the offset between the two clocks
        # is stored.
        self._epoch_s = time.time() - time.perf_counter()

    def begin(self, method: str, path: str, headers: Any, request_id: str, arrived_at: float) -> "RequestSpan":
        """Begin the span of a request that has arrived; the request's header `traceparent` names the parent span."""
        from opentelemetry.trace import SpanKind

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        attributes = {"http.request.method": method, "url.path": path, "wingbeat.request_id": request_id}
        span = self._tracer.start_span(
            f"{method} {path}",
            self._extract(carrier),
            SpanKind.SERVER,
            attributes,
            start_time=self.nanoseconds(arrived_at),
        )
        return RequestSpan(self, span)

    def nanoseconds(self, clock_s: float) -> int:
        """Convert a time of the requests' monotonic clock to the time of day in nanoseconds."""
        return int(1e9 * (self._epoch_s + clock_s))

    def start_child(self, parent: Any, name: str, attributes: dict[str, Any], start_s: float) -> Any:
        """Begin a span within the span `parent`, and return it."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self.nanoseconds(start_s))

    def close(self) -> None:
        """Send the spans that are not sent yet."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one HTTP request."""

    def __init__(self, tracer: RequestTracer, span: Any) -> None:
        self._tracer = tracer
        self._span = span

    def choice(self, watch: "ClientWatch", ended_at: float) -> None:
        """Add the span of a finished choice, with vLLM's attribute names."""
        params = watch.request.params
        attributes = {
            "gen_ai.request.id": watch.request.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(watch.request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": watch.num_tokens,
            "gen_ai.response.finish_reasons": [watch.end],
            "gen_ai.latency.e2e": ended_at - watch.arrived_at,
            "wingbeat.engine": watch.engine_id,
        }
        if watch.first_token_at is not None:
            attributes["gen_ai.latency.time_to_first_token"] = watch.first_token_at - watch.arrived_at
            attributes["gen_ai.latency.time_in_queue"] = watch.queue_s
        span = self._tracer.start_child(self._span, "llm_request", attributes, watch.arrived_at)
        if watch.first_token_at is not None:
            span.add_event("first_token", timestamp=self._tracer.nanoseconds(watch.first_token_at))
        span.end(self._tracer.nanoseconds(ended_at))

    def end(self, status: int) -> None:
        """End the span; called after the answer was sent."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
