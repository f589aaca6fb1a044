"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answers.answering import read_body, streamed_answer, whole_answer
from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.field_names import field_names
from wingbeat.deployments.api.messages_api.body import NAMES, CountBody, MessagesBody
from wingbeat.deployments.api.messages_api.error_form import MESSAGES_PATH
from wingbeat.deployments.api.messages_api.output import MessageOutput
from wingbeat.deployments.api.parsed.answer import ParsedAnswer, parsed
from wingbeat.deployments.api.parsed.typed_events import last_events, typed_events
from wingbeat.deployments.api.served_models import ServedModels

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
BODIES = {MESSAGES_PATH: MessagesBody, COUNT_PATH: CountBody}


def add_messages_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds `/v1/messages` and `/v1/messages/count_tokens`."""

    @app.post(MESSAGES_PATH)
    async def messages(request: Request) -> Response:
        body = await read_body(MessagesBody, request)
        with field_names(NAMES):
            service = models.choose(body.model)
            generation = await service.plan_chat(body.as_chat())
        answer = parsed(generation, service.run(generation))
        if not body.stream:
            return await whole_answer(request, _whole(generation, answer))
        return await streamed_answer(request, typed_events(MessageOutput(generation), answer, request.state.request_id))

    @app.post(COUNT_PATH)
    async def count_tokens(request: Request) -> dict[str, Any]:
        body = await read_body(CountBody, request)
        with field_names(NAMES):
            chat = body.as_chat()
            service = models.choose(chat.model)
            return {"input_tokens": len((await service.prompts.of_chat(chat)).token_ids)}


async def _whole(generation: Generation, answer: ParsedAnswer) -> dict[str, Any]:
    output = MessageOutput(generation)
    piece, _ = await last_events(output, answer)
    return output.message(piece)
