"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answering import read_body, streamed_answer, whole_answer
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import MESSAGES_PATH, as_api_error, error_body, log_failure
from wingbeat.deployments.api.field_names import field_names
from wingbeat.deployments.api.generation import Generation
from wingbeat.deployments.api.messages_api.body import NAMES, CountBody, MessagesBody
from wingbeat.deployments.api.messages_api.output import Event, MessageOutput
from wingbeat.deployments.api.parsed_answer import ParsedAnswer, parsed


def add_messages_routes(app: FastAPI, service: CompletionService) -> None:
    """Add both endpoints."""

    @app.post(MESSAGES_PATH)
    async def messages(request: Request) -> Response:
        body = await read_body(MessagesBody, request)
        with field_names(NAMES):
            generation = await service.plan_chat(body.as_chat())
        answer = parsed(generation, service.run(generation))
        if not body.stream:
            return await whole_answer(request, _whole(generation, answer))
        return await streamed_answer(request, _events(generation, answer, request.state.request_id))

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: Request) -> dict[str, Any]:
        body = await read_body(CountBody, request)
        with field_names(NAMES):
            chat = body.as_chat()
            service.check_model(chat.model)
            return {"input_tokens": len((await service.chat_prompt(chat)).token_ids)}


async def _whole(generation: Generation, answer: ParsedAnswer) -> dict[str, Any]:
    output = MessageOutput(generation)
    async with aclosing(answer):
        async for piece in answer:
            output.add(piece.found)
    output.end(piece)
    return output.message(piece)


async def _events(generation: Generation, answer: ParsedAnswer, request_id: str) -> AsyncGenerator[bytes, None]:
    """Typed events, as they come; raises what is raised before the first one."""
    output, started = MessageOutput(generation), False
    try:
        async with aclosing(answer):
            async for piece in answer:
                events = [] if started else output.begin()
                started = True
                events += output.add(piece.found)
                if piece.finish_reason is not None:
                    events += output.end(piece)
                if events:
                    yield _written(events)
    except Exception as error:
        if not started:
            raise
        log_failure(error, request_id)
        body = error_body(MESSAGES_PATH, as_api_error(error))
        yield _written([Event("error", {"error": body["error"]})])


def _written(events: Iterable[Event]) -> bytes:
    lines = (
        f"event: {event.type}\ndata: {json.dumps({'type': event.type, **event.fields}, separators=(',', ':'))}\n\n"
        for event in events
    )
    return "".join(lines).encode()
