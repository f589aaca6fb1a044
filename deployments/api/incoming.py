"""Request bodies: limits the memory of all bodies together, and answers requests whose body is still incomplete."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from wingbeat.deployments.fleet.interface import EngineOverloaded

SHORT_BODY_BYTES = 2**16
"""Bodies up to this size are always accepted, and their memory is not counted."""

_AT_ONCE_S = 0.05
"""Seconds to wait for the rest of a refused request's body; if the rest arrives in this time, the connection can be
used for the next request.
"""


class BodyRoom:
    """Counter of the memory, in bytes, of one request's body."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.num_bytes = 0

    def set_size(self, num_bytes: int) -> None:
        """Sets the counter to `num_bytes`, the size of the body that has been read so far.

        Raises:
            EngineOverloaded: the bodies of all requests together exceed the limit.
        """
        if num_bytes <= SHORT_BODY_BYTES:
            return
        self._bodies.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes
        if self._bodies.num_bytes > self._bodies.max_bytes:
            raise EngineOverloaded("There is no room for more long request bodies now. Retry shortly.")


class Bodies:
    """Memory of the bodies of all unanswered requests; short bodies are not counted."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0

    @contextmanager
    def room(self) -> Iterator[BodyRoom]:
        """Context that counts one request's body."""
        room = BodyRoom(self)
        try:
            yield room
        finally:
            self.num_bytes -= room.num_bytes


class Incoming:
    """Wraps a request's ASGI `receive`, and records whether the whole body has been received.

    Args:
        max_dropped_bytes: maximum bytes of a body that `drain` reads.
    """

    def __init__(self, receive: Receive, max_dropped_bytes: int) -> None:
        self._receive, self._num_left = receive, max_dropped_bytes
        self.complete = False

    async def __call__(self) -> Message:
        """Returns the next ASGI message of the request."""
        message = await self._receive()
        self.complete |= message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def drain(self, timeout_s: float) -> None:
        """Reads and drops the rest of the body, up to `max_dropped_bytes` and `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.complete and self._num_left > 0:
                    self._num_left -= len((await self()).get("body", b""))


async def answer_early(response: Response, scope: Scope, incoming: Incoming, send: Send, timeout_s: float) -> None:
    """Sends an answer before the request's body is complete.

    If the connection were closed while the client is still sending, the connection would be reset, and a client that
    reads only after it has sent everything would lose the answer. Therefore the answer is sent first, the rest of the
    body is read and dropped for at most `timeout_s` seconds, and then the connection is closed.
    """
    # Nothing is received here: the first receive() would send `100 Continue` to a client that waits for it, and the
    # client would then send its body.
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
