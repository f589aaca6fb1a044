"""What a client is still sending while it is answered already."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from wingbeat.deployments.fleet.interface import EngineOverloaded

SHORT_BODY_BYTES = 2**16

_AT_ONCE_S = 0.05
"""What the rest of a body may take to be there, so that its connection can go on to the next request."""


class BodyRoom:
    """What one request's body takes."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """The body has become so long.

        Raises:
            EngineOverloaded: there is no room for it now.
        """
        if num_bytes <= SHORT_BODY_BYTES:
            return
        self._bodies.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes
        if self._bodies.num_bytes > self._bodies.max_bytes:
            raise EngineOverloaded("There is no room for more long request bodies now. Retry shortly.")


class Bodies:
    """Bodies of all requests that are not answered yet; short ones are always taken."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0

    @contextmanager
    def room(self) -> Iterator[BodyRoom]:
        """While it is entered, a request's body counts."""
        room = BodyRoom(self)
        try:
            yield room
        finally:
            self.num_bytes -= room.num_bytes


class Incoming:
    """A request's messages; knows whether its body is complete.

    Args:
        max_dropped_bytes: of the body that may be read for nothing.
    """

    def __init__(self, receive: Receive, max_dropped_bytes: int) -> None:
        self._receive, self._num_left = receive, max_dropped_bytes
        self.complete = False

    async def __call__(self) -> Message:
        """The next one."""
        message = await self._receive()
        self.complete |= message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def drain(self, timeout_s: float) -> None:
        """Read and drop what comes of the body."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.complete and self._num_left > 0:
                    self._num_left -= len((await self()).get("body", b""))


async def answer_early(response: Response, scope: Scope, incoming: Incoming, send: Send, timeout_s: float) -> None:
    """Send an answer that does not wait for the request's body.

    A connection that is closed while its client sends is reset, and the answer is lost to a client that reads only once
    it has sent all. So the answer is sent, the rest of the body is dropped for at most `timeout_s`, and then the
    connection ends.
    """
    # Whoever waits for `100 Continue` is not to be asked for a body, which the first look at one does.
    if (b"expect", b"100-continue") not in scope["headers"]:
        await incoming.drain(_AT_ONCE_S)
    if incoming.complete:
        await response(scope, incoming, send)
        return
    response.headers["connection"] = "close"

    async def send_unended(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "more_body": True}
        await send(message)

    await response(scope, incoming, send_unended)
    await incoming.drain(timeout_s)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
