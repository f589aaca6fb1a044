"""`/metrics`: the application as monitors see it."""

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.guard import AnswerWatcher
from wingbeat.deployments.metrics.exposition import exposed
from wingbeat.deployments.metrics.monitor import Monitor


def answer_watchers(monitor: Monitor) -> list[AnswerWatcher]:
    """What looks at every answer."""
    return [lambda scope, context: monitor.own.answered(context.status)]


def add_monitoring(app: FastAPI, monitor: Monitor) -> None:
    """The endpoints that only look."""

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        snapshot = await monitor.fleet.snapshot()
        # In a thread: thousands of lines, and other requests' streams must keep moving.
        body, media_type = await asyncio.to_thread(exposed, snapshot, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})
