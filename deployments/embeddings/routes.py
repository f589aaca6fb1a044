"""`POST /v1/embeddings`."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answers.answering import read_body, unless_gone
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.embeddings.answer import Embeddings
from wingbeat.deployments.embeddings.body import EmbeddingsBody

EMBEDDINGS_PATH = "/v1/embeddings"
BODIES = {EMBEDDINGS_PATH: EmbeddingsBody}


def add_embedding_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the endpoint."""

    @app.post(EMBEDDINGS_PATH)
    async def embeddings(request: Request) -> Response:
        body = await read_body(EmbeddingsBody, request)
        embeddings = Embeddings(models.choose(body.model))
        return Response(await unless_gone(request, embeddings.answer(body)), media_type="application/json")
