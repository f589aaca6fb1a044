"""Hooks of `/trace`. The implementation is imported only when needed, because commands import this file."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.model_front import ModelFront

operator_paths = ("/trace",)


SPARE_S = 10.0
"""Seconds that an engine goes on recording after the requested time, in case the router is late to stop the trace."""


def engine_operations(engine: Any) -> dict[str, Callable[..., Any]]:
    """Return the operations that start and stop traces."""
    if not hasattr(engine, "clock"):
        return {}
    from wingbeat.deployments.round_traces.round_trace import Traces

    traces = Traces(engine.clock)
    return {"start_trace": traces.start, "stop_trace": traces.stop}


def add_router_routes(app: "FastAPI", fronts: "Sequence[ModelFront]") -> None:
    """Add `GET /trace`."""
    from wingbeat.deployments.round_traces.routes import add_trace_route

    def engine_ids() -> frozenset[str]:
        return frozenset().union(*(front.pool.engine_ids for front in fronts))

    async def record(engine_id: str, seconds: float) -> list[tuple]:
        front = next((front for front in fronts if engine_id in front.pool.engine_ids), fronts[0])

        async def operate(operation: str, argument: float) -> Any:
            return await front.source.call(engine_id, "operate", operation=operation, arguments=(argument,))

        number = await operate("start_trace", seconds + SPARE_S)
        try:
            await asyncio.sleep(seconds)
        finally:
            events = asyncio.ensure_future(operate("stop_trace", number))
        return await events

    add_trace_route(app, engine_ids, record)
