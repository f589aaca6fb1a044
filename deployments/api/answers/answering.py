"""Reads request bodies, and makes HTTP responses; work on an answer is cancelled when its client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, Self, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from wingbeat.deployments.api.answers.json_pieces import fragments, json_pieces, paced
from wingbeat.deployments.api.errors import ClientGone

LONG_BODY_BYTES = 2**16
"""Bodies that are longer than this are parsed in a thread, so that the streams of other requests are not delayed."""


class Parsed(Protocol):
    """Interface of a request body's class."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses and validates a body; raises ApiError."""
        ...


Body = TypeVar("Body", bound=Parsed)


class PieceStream(StreamingResponse):
    """Response body in pieces.

    The generator of the pieces is closed as soon as the client disconnects, not only when it is garbage-collected.
    """

    media_type = "application/json"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        held: ExitStack | None = None,
    ) -> None:
        """Makes the response. `held` holds the contexts that reserve memory for the response; they are closed when all
        pieces are sent or the client has disconnected.
        """
        super().__init__(_prepend(first, rest), headers=headers)
        self._rest, self._held = rest, held or ExitStack()

    async def __call__(self, scope, receive, send) -> None:
        """Sends the pieces; see `StreamingResponse`."""
        with self._held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.body_iterator.aclose()
                await self._rest.aclose()


class EventStream(PieceStream):
    """Response body of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], held: ExitStack | None = None) -> None:
        super().__init__(first, rest, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, held)


async def read_body(kind: type[Body], request: Request) -> Body:
    """Reads and validates the request's body; raises ApiError if the body is invalid."""
    body = await request.body()
    return await request.app.state.off_loop.run(len(body), kind.parse, body, long=LONG_BODY_BYTES)


async def whole_answer(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """Returns the result of `work` as JSON; `work` is cancelled if the client disconnects."""
    return JSONResponse(await unless_gone(request, work))


async def long_answer(
    request: Request, work: Coroutine[Any, Any, Any], turn: asyncio.Lock, room: AbstractContextManager[None]
) -> Response:
    """Like `whole_answer`, but for a body with `LongList`s, which is written in pieces as fast as the client reads
    them.

    `room` is a context manager that reserves memory for the answer until the answer is sent.
    """
    with ExitStack() as held:
        try:
            held.enter_context(room)
        except BaseException:
            work.close()
            raise
        return await written_answer(await unless_gone(request, work), turn, held)


async def written_answer(body: Any, turn: asyncio.Lock, held: ExitStack | None = None) -> Response:
    """Returns a response that writes a body with `LongList`s in pieces. For `held`, see `PieceStream`."""
    pieces = paced(json_pieces(fragments(body)), turn)
    first = await anext(pieces)
    second = await anext(pieces, None)
    if second is None:
        return Response(first, media_type="application/json")
    return PieceStream(first, _prepend(second, pieces), held=(held or ExitStack()).pop_all())


async def streamed_answer(
    request: Request, events: AsyncGenerator[bytes, None], room: AbstractContextManager[None] | None = None
) -> Response:
    """Returns a response that streams events.

    An error that occurs before the first event is raised. For `room`, see `long_answer`.
    """
    # The first event is awaited here, so that an error before it (for example, the server is overloaded) can still be
    # answered with an HTTP error status.
    with ExitStack() as held:
        try:
            held.enter_context(room or nullcontext())
            first = await unless_gone(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, held.pop_all())


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of `work`, which is cancelled if the client disconnects or the handler is cancelled.

    Raises:
        ClientGone: the client disconnected first.
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
