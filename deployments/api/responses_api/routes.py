"""`POST /v1/responses`."""

from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.answers.answering import read_body, streamed_answer, whole_answer
from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.field_names import field_names
from wingbeat.deployments.api.parsed.answer import ParsedAnswer, parsed
from wingbeat.deployments.api.parsed.typed_events import last_events, typed_events
from wingbeat.deployments.api.responses_api.body import NAMES, ResponsesBody
from wingbeat.deployments.api.responses_api.output import ResponseOutput
from wingbeat.deployments.api.served_models import ServedModels

BODIES = {"/v1/responses": ResponsesBody}


def add_responses_route(app: FastAPI, models: ServedModels) -> None:
    """Adds the endpoint."""

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await read_body(ResponsesBody, request)
        with field_names(NAMES):
            service = models.choose(body.model)
            generation = replace(await service.plan_chat(body.as_chat()), prompt_field=NAMES["messages"])
        answer = parsed(generation, service.run(generation))
        if not body.stream:
            return await whole_answer(request, _whole(generation, answer, body))
        return await streamed_answer(
            request, typed_events(ResponseOutput(generation, body), answer, request.state.request_id)
        )


async def _whole(generation: Generation, answer: ParsedAnswer, body: ResponsesBody) -> dict[str, Any]:
    _, events = await last_events(ResponseOutput(generation, body), answer)
    return events[-1].fields["response"]
