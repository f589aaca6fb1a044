"""`POST /inference/v1/generate`, and `POST /v1/chat/completions/render`, which converts a chat request to a body for
`/inference/v1/generate`.
"""

from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answers.answering import read_body
from wingbeat.deployments.api.answers.generation import ChoiceDelta
from wingbeat.deployments.api.answers.token_details import chat_logprobs
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.errors import invalid
from wingbeat.deployments.api.field_names import field_names
from wingbeat.deployments.api.routes import generated_answer
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.api.token_generation.body import NAMES, GenerateBody, rendered


class TokensShape:
    """Form of `/inference/v1/generate`: choices have token ids and no text."""

    object_name = chunk_object_name = "token_ids"
    id_name = "request_id"
    logprobs_body = staticmethod(chat_logprobs)
    prompt_at_top = True

    def choice(self, last: ChoiceDelta, text: str) -> dict[str, Any]:
        """Returns a choice without text; the caller adds its token ids."""
        return {"index": last.index, "logprobs": None, "finish_reason": last.finish_reason}

    def chunk_choices(self, delta: ChoiceDelta, is_first: bool) -> list[dict[str, Any]]:
        """Returns a list of one choice, or an empty list if there are no tokens and no finish reason."""
        return [self.choice(delta, "")] if delta.num_tokens or delta.finish_reason is not None else []


def add_token_generation(app: FastAPI, models: ServedModels) -> None:
    """Adds both endpoints."""

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body = await read_body(GenerateBody, request)
        with field_names(NAMES):
            service = models.choose(body.model)
            planned = await service.plan_completion(body.as_completion())
        generation = replace(planned, prompt_field=NAMES["prompt"])
        return await generated_answer(request, service, generation, TokensShape(), bool(body.stream))

    @app.post("/v1/chat/completions/render")
    async def render(request: Request) -> dict[str, Any]:
        body = await read_body(ChatBody, request)
        service = models.choose(body.model)
        if body.other_parts:
            raise invalid(body.other_parts[0].path, "is not rendered here; only text is")
        return rendered(body, await service.plan_chat(body))
