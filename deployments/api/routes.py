"""The HTTP surface as a FastAPI application; knows the OpenAI API and a completion service, but not Ray."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.chat_requests import ChatBody
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import ClientGone, unknown_model
from wingbeat.deployments.api.generation import Generation
from wingbeat.deployments.api.guard import HttpGuard, HttpLimits
from wingbeat.deployments.api.load import add_load
from wingbeat.deployments.api.monitoring import add_monitoring, watchers
from wingbeat.deployments.api.parsed_chat import ParsedChatShape
from wingbeat.deployments.api.requests import CompletionBody, GenerationBody
from wingbeat.deployments.api.responses import (
    CompletionShape,
    ResponseShape,
    event_stream,
    whole_response,
)
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.page.playground import add_page

LONG_BODY_BYTES = 2**16
"""Bodies above this are read in a thread, so that other streams keep moving."""

Body = TypeVar("Body", bound=GenerationBody)


class EventStream(StreamingResponse):
    """Server-sent events; the generator is closed at once when the client leaves, not when it is collected."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_prepend(first, rest), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._rest = rest

    async def __call__(self, scope, receive, send) -> None:
        """Send the events; see `StreamingResponse`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()
            await self._rest.aclose()


def create_app(
    service: CompletionService,
    access: Access | None = None,
    limits: HttpLimits | None = None,
    adds_request_id: bool = True,
    monitor: Monitor | None = None,
) -> FastAPI:
    """The application: `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health`, and `/metrics` of a monitor.

    Without `access` everyone may use it. `adds_request_id`: see `HttpGuard`.
    """
    # No generated API description: bodies are read by hand, so FastAPI would describe them wrongly.
    app = FastAPI(title="Wingbeat", openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        HttpGuard,
        routes=app.routes,
        access=access or Access(),
        limits=limits or HttpLimits(),
        adds_request_id=adds_request_id,
        watchers=() if monitor is None else watchers(monitor),
    )
    if monitor is not None:
        add_monitoring(app, monitor)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _parse(CompletionBody, request)
        generation = await service.plan_completion(body)
        return await _answer(request, service, generation, CompletionShape(), bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _parse(ChatBody, request)
        generation = await service.plan_chat(body)
        return await _answer(request, service, generation, ParsedChatShape(generation), bool(body.stream))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != service.pool.info.model_name:
            raise unknown_model(model, service.pool.info.model_name)
        return _model_card(service)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if service.pool.healthy():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, status_code=503, headers={"Retry-After": "1"})

    add_page(app, service.pool)
    add_load(app, service.pool)
    return app


async def _parse(kind: type[Body], request: Request) -> Body:
    body = await request.body()
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(kind.parse, body)
    return kind.parse(body)


async def _answer(
    request: Request, service: CompletionService, generation: Generation, shape: ResponseShape, stream: bool
) -> Response:
    deltas = service.run(generation)
    if not stream:
        return JSONResponse(await _unless_gone(request, whole_response(generation, deltas, shape)))
    events = event_stream(generation, deltas, shape, request.state.request_id)
    # The first event is awaited here, so that an overloaded server can still answer with a status.
    try:
        first = await _unless_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves or the handler is cancelled.

    Raises:
        ClientGone: the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _prepend(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for event in rest:
        yield event


def _model_card(service: CompletionService) -> dict[str, Any]:
    info = service.pool.info
    return {
        "id": info.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "wingbeat",
        "max_model_len": info.max_model_len,
        "drafter": info.drafter,
    }
