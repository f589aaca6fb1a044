"""`/v1/models`: lists the base models, under all their names, and the served variants."""

from typing import Any

from fastapi import FastAPI

from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.served_models import ServedModels


def add_model_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds `/v1/models` and `/v1/models/{name}`."""

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, name) for service in models for name in _names(service)]}

    @app.get("/v1/models/{model:path}")
    async def one(model: str) -> dict[str, Any]:
        return _card(models.choose(model), model)


def _names(service: CompletionService) -> list[str]:
    return [*service.prompts.names, *(variant.name for variant in service.pool.variants.things)]


def _card(service: CompletionService, name: str) -> dict[str, Any]:
    info = service.pool.info
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "wingbeat",
        "root": info.model_name,
        "parent": None if name in service.prompts.names else info.model_name,
        "max_model_len": info.max_model_len,
        "drafter": info.drafter,
    }
