"""`/v1/models`: the one model that is served."""

from typing import Any

from fastapi import FastAPI

from wingbeat.deployments.api.errors import unknown_model
from wingbeat.deployments.fleet.interface import ModelInfo


def add_model_routes(app: FastAPI, info: ModelInfo) -> None:
    """Add both endpoints."""
    card = {
        "id": info.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "wingbeat",
        "max_model_len": info.max_model_len,
        "drafter": info.drafter,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != info.model_name:
            raise unknown_model(model, info.model_name)
        return card
