"""`POST /v1/responses`."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answering import read_body, streamed_answer, whole_answer
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import as_api_error, log_failure
from wingbeat.deployments.api.field_names import field_names
from wingbeat.deployments.api.generation import Generation
from wingbeat.deployments.api.parsed_answer import ParsedAnswer, parsed
from wingbeat.deployments.api.responses_api.body import NAMES, ResponsesBody
from wingbeat.deployments.api.responses_api.output import Event, ResponseOutput


def add_responses_route(app: FastAPI, service: CompletionService) -> None:
    """Add the endpoint."""

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await read_body(ResponsesBody, request)
        with field_names(NAMES):
            generation = await service.plan_chat(body.as_chat())
        answer = parsed(generation, service.run(generation))
        if not body.stream:
            return await whole_answer(request, _whole(generation, answer, body))
        return await streamed_answer(request, _events(generation, answer, body, request.state.request_id))


async def _whole(generation: Generation, answer: ParsedAnswer, body: ResponsesBody) -> dict[str, Any]:
    output, last = ResponseOutput(generation, body), []
    async with aclosing(answer):
        async for piece in answer:
            output.add(piece.found)
            if piece.finish_reason is not None:
                last = output.end(piece.finish_reason, piece.totals, piece.reasoning_tokens)
    return last[-1].fields["response"]


async def _events(
    generation: Generation, answer: ParsedAnswer, body: ResponsesBody, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Typed events, as they come; raises what is raised before the first one."""
    output, number, started = ResponseOutput(generation, body), 0, False

    def written(events: Iterable[Event]) -> bytes:
        nonlocal number
        text = b""
        for event in events:
            data = json.dumps({"type": event.type, "sequence_number": number, **event.fields}, separators=(",", ":"))
            text += f"event: {event.type}\ndata: {data}\n\n".encode()
            number += 1
        return text

    try:
        async with aclosing(answer):
            async for piece in answer:
                events = [] if started else output.begin()
                started = True
                events += output.add(piece.found)
                if piece.finish_reason is not None:
                    events += output.end(piece.finish_reason, piece.totals, piece.reasoning_tokens)
                if events:
                    yield written(events)
    except Exception as error:
        if not started:
            raise
        log_failure(error, request_id)
        answer_error = as_api_error(error)
        yield written(output.fail(answer_error.code or "server_error", answer_error.message))
