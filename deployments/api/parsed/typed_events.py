"""An answer as typed server-sent events: what endpoints whose events have names share."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from wingbeat.deployments.api.errors import log_failure
from wingbeat.deployments.api.parsed.answer import ParsedAnswer, Piece
from wingbeat.deployments.parsing.message import MessageDelta


class Event(NamedTuple):
    """One event."""

    type: str
    fields: dict[str, Any]

    def written(self) -> bytes:
        """As it is sent."""
        data = json.dumps({"type": self.type, **self.fields}, separators=(",", ":"))
        return f"event: {self.type}\ndata: {data}\n\n".encode()


class Output(Protocol):
    """One answer as it grows, in the form of its endpoint."""

    def begin(self) -> list[Event]:
        """The answer without anything in it."""
        ...

    def add(self, found: MessageDelta) -> list[Event]:
        """What the answer gained."""
        ...

    def end(self, piece: Piece) -> list[Event]:
        """The end of the answer, by its last piece."""
        ...

    def fail(self, error: Exception) -> list[Event]:
        """The answer ends by an error."""
        ...


async def typed_events(output: Output, answer: ParsedAnswer, request_id: str) -> AsyncGenerator[bytes, None]:
    """The events as they come; raises what is raised before the first one."""
    started = False
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
        yield _written(output.fail(error))


async def last_events(output: Output, answer: ParsedAnswer) -> tuple[Piece, list[Event]]:
    """The last piece of an answer that is told at once, and the events of its end."""
    async with aclosing(answer):
        async for piece in answer:
            output.add(piece.found)
    return piece, output.end(piece)


def _written(events: list[Event]) -> bytes:
    return b"".join(event.written() for event in events)
