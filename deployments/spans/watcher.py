"""Writes a span for each HTTP request whose path begins with `TRACED`."""

from starlette.datastructures import Headers
from starlette.types import Scope

from wingbeat.deployments.api.errors import shown
from wingbeat.deployments.api.guard import RequestWatcher
from wingbeat.deployments.request_context import RequestContext
from wingbeat.deployments.spans.tracing import RequestTracer

TRACED = "/v1"
"""Path prefix of requests that get spans. Scrapes and health checks get no spans."""


class SpanWriter(RequestWatcher):
    """Writes a span per request."""

    def __init__(self, tracer: RequestTracer) -> None:
        self._tracer = tracer

    def began(self, scope: Scope, context: RequestContext) -> None:
        """Begin the request's span, within which the spans of choices are created."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(TRACED):
            context.span = self._tracer.begin(
                method=scope["method"],
                path=shown(path),
                headers=Headers(scope=scope),
                request_id=context.request_id,
                arrived_at=context.arrived_at,
            )

    def ended(self, scope: Scope, context: RequestContext) -> None:
        """End the span."""
        if context.span is not None:
            context.span.end(context.status)

    def close(self) -> None:
        """Send the spans that are not sent yet."""
        self._tracer.close()
