"""From a request to its body, and from an answer's pieces to an HTTP response that ends when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, Self, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from wingbeat.deployments.api.answers.json_pieces import fragments, json_pieces, paced
from wingbeat.deployments.api.errors import ClientGone

LONG_BODY_BYTES = 2**16
"""Bodies above this are read in a thread, so that other streams keep moving."""


class Parsed(Protocol):
    """What is read from a body in bytes."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and check; raises ApiError."""
        ...


Body = TypeVar("Body", bound=Parsed)


class PieceStream(StreamingResponse):
    """A body in pieces; the generator is closed at once when the client leaves, not when it is collected."""

    media_type = "application/json"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        held: ExitStack | None = None,
    ) -> None:
        """`held` is left when all is sent, or the client has left."""
        super().__init__(_prepend(first, rest), headers=headers)
        self._rest, self._held = rest, held or ExitStack()

    async def __call__(self, scope, receive, send) -> None:
        """Send the pieces; see `StreamingResponse`."""
        with self._held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.body_iterator.aclose()
                await self._rest.aclose()


class EventStream(PieceStream):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], held: ExitStack | None = None) -> None:
        super().__init__(first, rest, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, held)


async def read_body(kind: type[Body], request: Request) -> Body:
    """The request's body, checked; raises ApiError where it is wrong."""
    body = await request.body()
    return await request.app.state.off_loop.run(len(body), kind.parse, body, long=LONG_BODY_BYTES)


async def whole_answer(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """What `work` brings as JSON; it is cancelled when the client leaves."""
    return JSONResponse(await unless_gone(request, work))


async def long_answer(
    request: Request, work: Coroutine[Any, Any, Any], turn: asyncio.Lock, room: AbstractContextManager[None]
) -> Response:
    """`whole_answer` of a body with `LongList`s: written in pieces, as fast as its client takes them.

    `room` is what it takes until it is sent.
    """
    with ExitStack() as held:
        try:
            held.enter_context(room)
        except BaseException:
            work.close()
            raise
        return await written_answer(await unless_gone(request, work), turn, held)


async def written_answer(body: Any, turn: asyncio.Lock, held: ExitStack | None = None) -> Response:
    """A body with `LongList`s, written in pieces; `held` is left when they are sent."""
    pieces = paced(json_pieces(fragments(body)), turn)
    first = await anext(pieces)
    second = await anext(pieces, None)
    if second is None:
        return Response(first, media_type="application/json")
    return PieceStream(first, _prepend(second, pieces), held=(held or ExitStack()).pop_all())


async def streamed_answer(
    request: Request, events: AsyncGenerator[bytes, None], room: AbstractContextManager[None] | None = None
) -> Response:
    """The events as they come; raises what is raised before the first one. `room`: see `long_answer`."""
    # It is awaited here, so that an overloaded server can still answer with a status.
    with ExitStack() as held:
        try:
            held.enter_context(room or nullcontext())
            first = await unless_gone(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, held.pop_all())


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
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
