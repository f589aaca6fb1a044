"""`GET /trace`: a trace of all engines over the next seconds, as the JSON that Chrome's tracing page and Perfetto
display.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.errors import ApiError, shown

logger = logging.getLogger(__name__)
Events = Sequence[tuple[str, float, float, dict[str, Any] | None, str]]
"""`wingbeat.deployments.round_traces.round_trace.TraceEvent`s as tuples."""
Record = Callable[[str, float], Awaitable[Events]]
"""Function (engine id, seconds) -> events of the engine's rounds, recorded for this long; raises the exceptions of the
transport.
"""
LATE_S = 5.0
"""Maximum seconds between the end of the recorded time and the arrival of an engine's trace."""
PHASES, ROUNDS, DRAFTER = 0, 1, 3
"""Numbers of an engine's rows in the trace. Rounds alternate between two rows, because successive rounds overlap in
time if the host is ahead of the device.
"""


async def recorded(engine_ids: frozenset[str], record: Record, seconds: float) -> bytes:
    """Record all engines for some seconds and return their trace; an engine that returns no trace is listed in
    `otherData`.
    """
    names = sorted(engine_ids)
    recordings = await asyncio.gather(*(_one(name, record, seconds) for name in names))
    return await asyncio.to_thread(chrome_trace, dict(zip(names, recordings, strict=True)))


def chrome_trace(recordings: dict[str, Events | None]) -> bytes:
    """Return a trace as JSON, with one process per engine in the order given, and times in microseconds."""
    shown: list[dict[str, Any]] = []
    for pid, (engine_id, events) in enumerate(recordings.items()):
        rows = {PHASES: "phases", ROUNDS: "rounds", ROUNDS + 1: "rounds", DRAFTER: "drafter"}
        shown.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"engine {engine_id}"}})
        shown += [
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in rows.items()
        ]
        num_rounds = 0
        for name, start_s, seconds, details, row in events or ():
            tid = DRAFTER if row == "drafter" else PHASES
            if row == "rounds":
                tid, num_rounds = ROUNDS + num_rounds % 2, num_rounds + 1
            event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 1e6 * start_s, "dur": 1e6 * seconds}
            if details is not None:
                event["args"] = details
            shown.append(event)
    silent = [engine_id for engine_id, events in recordings.items() if events is None]
    return json.dumps({"traceEvents": shown, "displayTimeUnit": "ms", "otherData": {"silent": silent}}).encode()


async def _one(engine_id: str, record: Record, seconds: float) -> Events | None:
    try:
        async with asyncio.timeout(seconds + LATE_S):
            return await record(engine_id, seconds)
    except Exception as error:
        # For an engine that is gone or hangs, the transport may raise any exception.
        logger.warning("Engine %s returned no trace: %s", engine_id, type(error).__name__)
        return None


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
