"""Hook of `/trace`. The implementation is imported only when needed, because commands import this file."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.model_front import ModelFront

operator_paths = ("/trace",)


def add_router_routes(app: "FastAPI", fronts: "Sequence[ModelFront]") -> None:
    """Add `GET /trace`."""
    from wingbeat.deployments.round_traces.routes import add_trace_route

    def engine_ids() -> frozenset[str]:
        return frozenset().union(*(front.pool.engine_ids for front in fronts))

    async def record(engine_id: str, seconds: float) -> list[tuple]:
        front = next((front for front in fronts if engine_id in front.pool.engine_ids), fronts[0])
        return await front.source.call(engine_id, "trace", seconds=seconds)

    add_trace_route(app, engine_ids, record)
