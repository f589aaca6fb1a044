"""`GET /load`: how much this router has at its engines, under vLLM's name for it, and by engine."""

from typing import Any

from fastapi import FastAPI

from wingbeat.deployments.fleet.engine_pool import EnginePool


def add_load(app: FastAPI, pool: EnginePool) -> None:
    """Serve `/load`."""

    @app.get("/load")
    async def load() -> dict[str, Any]:
        engines = [
            {
                "engine": load.engine_id,
                "num_requests": load.num_requests,
                "outstanding_tokens": load.outstanding_tokens,
                "max_num_seqs": pool.max_num_seqs,
                "stalled": load.stalled,
            }
            for load in sorted(pool.loads(), key=lambda load: load.engine_id)
        ]
        return {"server_load": pool.num_admitted, "engines": engines}
