"""`GET /load`: this router's number of running requests, in vLLM's form, and the load of each engine."""

from typing import Any

from fastapi import FastAPI

from wingbeat.deployments.api.served_models import ServedModels


def add_load(app: FastAPI, models: ServedModels) -> None:
    """Adds `/load`."""
    pools = models.pools

    @app.get("/load")
    async def load() -> dict[str, Any]:
        engines = [
            {
                "engine": load.engine_id,
                **({"model": pool.info.model_name} if len(pools) > 1 else {}),
                "num_requests": load.num_requests,
                "outstanding_tokens": load.outstanding_tokens,
                "max_num_seqs": pool.max_num_seqs,
                "stalled": load.stalled,
            }
            for pool in pools
            for load in sorted(pool.loads(), key=lambda load: load.engine_id)
        ]
        return {"server_load": sum(pool.num_admitted for pool in pools), "engines": engines}
