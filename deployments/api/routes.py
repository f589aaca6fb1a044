"""The HTTP API as a FastAPI application on top of completion services. This module does not use Ray."""

from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.answers.answering import long_answer, read_body, streamed_answer, whole_answer
from wingbeat.deployments.api.answers.generation import Generation
from wingbeat.deployments.api.answers.responses import (
    CompletionShape,
    ResponseShape,
    chat_shape,
    event_stream,
    whole_response,
)
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.endpoints.model_routes import add_model_routes
from wingbeat.deployments.api.endpoints.monitoring import add_monitoring, watchers
from wingbeat.deployments.api.endpoints.server_routes import add_server_routes
from wingbeat.deployments.api.guard import HttpGuard, HttpLimits
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.parts import hooks


def create_app(
    served: CompletionService | ServedModels,
    access: Access | None = None,
    limits: HttpLimits | None = None,
    adds_request_id: bool = True,
    monitor: Monitor | None = None,
    marks: Mapping[str, str] | None = None,
    more_routes: Sequence[Callable[[FastAPI], None]] = (),
) -> FastAPI:
    """Builds the application with every endpoint of `docs/http_api.md`.

    Args:
        access: access rules; None allows every client.
        adds_request_id: see `HttpGuard`.
        monitor: adds `/metrics` if given.
        marks: headers of every answer.
        more_routes: functions that add further routes. They are given as functions because the routes need objects that
            this function does not have.
    """
    # FastAPI's own API description is off: the bodies are not declared to FastAPI, so its description of the endpoints
    # would be wrong.
    app = FastAPI(title="Wingbeat", openapi_url=None, redirect_slashes=False)
    models = ServedModels.of(served)
    app.state.off_loop = models.first.prompts.off_loop
    app.add_middleware(
        HttpGuard,
        routes=app.routes,
        access=access or Access(),
        limits=limits or HttpLimits(),
        adds_request_id=adds_request_id,
        watchers=() if monitor is None else watchers(monitor),
        marks=marks or {},
    )
    if monitor is not None:
        add_monitoring(app, monitor)

    add_server_routes(app, models)
    add_model_routes(app, models)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(CompletionBody, request)
        generation = await (service := models.choose(body.model)).plan_completion(body)
        return await generated_answer(request, service, generation, CompletionShape(), bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(ChatBody, request)
        generation = await (service := models.choose(body.model)).plan_chat(body)
        return await generated_answer(request, service, generation, chat_shape(generation), bool(body.stream))

    for add_more in more_routes:
        add_more(app)
    for add_routes in hooks("add_routes"):
        add_routes(app, models)
    for add_last in hooks("add_last"):
        add_last(app)
    return app


async def generated_answer(
    request: Request, service: CompletionService, generation: Generation, shape: ResponseShape, stream: bool
) -> Response:
    """Runs a generation; returns its answer in the form `shape`, whole or as a stream."""
    deltas = service.run(generation)
    room = service.sizes.held(generation.answer_bytes)
    if stream:
        events = event_stream(generation, deltas, shape, request.state.request_id, service.turn)
        return await streamed_answer(request, events, room)
    whole = whole_response(generation, deltas, shape)
    if generation.has_lists:
        return await long_answer(request, whole, service.turn, room)
    return await whole_answer(request, whole)
