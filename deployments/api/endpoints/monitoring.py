"""`/metrics`, and the access log."""

import asyncio
import logging
import time
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Scope

from wingbeat.deployments.api.errors import shown
from wingbeat.deployments.api.guard import RequestWatcher
from wingbeat.deployments.metrics.exposition import exposed
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.request_context import ACCESS, RequestContext

access_logger = logging.getLogger(ACCESS)
POLLED = frozenset({"/health", "/load", "/metrics", "/ping"})
"""Paths that web pages, health probes and metrics scrapers request about once a second. Requests to these paths are
logged only if they fail.
"""


def add_monitoring(app: FastAPI, monitor: Monitor) -> None:
    """Adds `/metrics`."""

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        snapshots = await asyncio.gather(*(fleet.snapshot() for fleet in monitor.fleets))
        # Metrics are formatted in a thread, because formatting thousands of lines would delay other requests' streams.
        body, media_type = await asyncio.to_thread(exposed, snapshots, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})


def watchers(monitor: Monitor) -> list[RequestWatcher]:
    """Returns the watchers to call for every request."""
    return [*([AccessLog()] if monitor.access_log else []), *monitor.watchers]


class AccessLog(RequestWatcher):
    """Logs one line per request, except for successful requests to the paths in `POLLED`."""

    def ended(self, scope: Scope, context: RequestContext) -> None:
        """Logs the request's line. Text from the client is escaped; only the request id is not, because its characters
        have been checked.
        """
        if context.status < 400 and scope["path"].removeprefix(scope.get("root_path", "")) in POLLED:
            return
        host, port = scope.get("client") or ("-", 0)
        access_logger.info(
            '%s:%s "%s %s" %d %.1f ms %s',
            host,
            port,
            quote(scope["method"]),
            shown(quote(scope["path"])),
            context.status,
            1e3 * (time.perf_counter() - context.arrived_at),
            context.request_id,
        )
