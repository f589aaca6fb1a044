"""`GET /trace`: a trace of all engines over the next seconds, for Chrome's tracing page and Perfetto."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.errors import ApiError, shown
from wingbeat.deployments.round_traces.chrome_trace import Record, recorded

DEFAULT_TRACE_S = 3.0
MAX_TRACE_S = 30.0


def add_trace_route(app: FastAPI, engine_ids: Callable[[], frozenset[str]], record: Record) -> None:
    """Add `GET /trace`.

    Args:
        engine_ids: returns the ids of all live engines.
        record: records one engine's rounds.
    """

    @app.get("/trace")
    async def trace(request: Request) -> Response:
        seconds = _seconds(request.query_params.get("seconds"))
        return Response(await recorded(engine_ids(), record, seconds), media_type="application/json")


def _seconds(text: str | None) -> float:
    """Return the seconds to record.

    Raises:
        ApiError: the text is not a number, or out of range.
    """
    try:
        seconds = DEFAULT_TRACE_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_S:
        message = f"seconds is {shown(text or '')!r}: must be a number above 0, at most {MAX_TRACE_S:g}"
        raise ApiError(message, param="seconds", code="invalid_value")
    return seconds
