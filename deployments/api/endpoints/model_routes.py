"""`/v1/models`: the base model, and the adapters that are served on top of it."""

from typing import Any

from fastapi import FastAPI

from wingbeat.deployments.api.completions import CompletionService


def add_model_routes(app: FastAPI, service: CompletionService) -> None:
    """Add both endpoints."""

    def card(name: str) -> dict[str, Any]:
        info = service.pool.info
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "wingbeat",
            "parent": None if name == info.model_name else info.model_name,
            "max_model_len": info.max_model_len,
            "drafter": info.drafter,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = [service.pool.info.model_name, *(adapter.name for adapter in service.pool.adapters.catalog.things)]
        return {"object": "list", "data": list(map(card, names))}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return card(model)
