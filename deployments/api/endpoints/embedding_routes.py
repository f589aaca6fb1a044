"""`POST /v1/embeddings`."""

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answers.answering import read_body
from wingbeat.deployments.api.bodies.embedding_body import EmbeddingsBody
from wingbeat.deployments.api.served_models import ServedModels

EMBEDDINGS_PATH = "/v1/embeddings"


def add_embedding_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the endpoint."""

    @app.post(EMBEDDINGS_PATH)
    async def embeddings(request: Request) -> Response:
        body = await read_body(EmbeddingsBody, request)
        answer = await models.choose(body.model).embeddings.answer(body)
        # Thousands of numbers per input: others' streams must keep moving.
        return Response(await asyncio.to_thread(_bytes, answer), media_type="application/json")


def _bytes(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()
