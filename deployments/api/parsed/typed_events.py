"""Answers as typed server-sent events, shared by the Messages API and the Responses API."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from wingbeat.deployments.api.errors import log_failure
from wingbeat.deployments.api.parsed.answer import ParsedAnswer, Piece
from wingbeat.deployments.parsing.message import MessageDelta


class Event(NamedTuple):
    """A typed event."""

    type: str
    fields: dict[str, Any]

    def written(self) -> bytes:
        """Returns the event's bytes."""
        data = json.dumps({"type": self.type, **self.fields}, separators=(",", ":"))
        return f"event: {self.type}\ndata: {data}\n\n".encode()


class Output(Protocol):
    """Builder of an answer in the form of its endpoint."""

    def begin(self) -> list[Event]:
        """Returns the events of the empty answer."""
        ...

    def add(self, found: MessageDelta) -> list[Event]:
        """Adds new text, reasoning and calls; returns their events."""
        ...

    def end(self, piece: Piece) -> list[Event]:
        """Returns the events that end the answer after its last piece."""
        ...

    def fail(self, error: Exception) -> list[Event]:
        """Returns the error events that end the answer."""
        ...


async def typed_events(output: Output, answer: ParsedAnswer, request_id: str) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of the answer's events.

    An error before the first event is raised; a later error is sent as an event.
    """
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
    """Reads a whole answer; returns its last piece and the events that end the answer."""
    async with aclosing(answer):
        async for piece in answer:
            output.add(piece.found)
    return piece, output.end(piece)


def _written(events: list[Event]) -> bytes:
    return b"".join(event.written() for event in events)
