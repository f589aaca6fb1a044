"""The HTTP request that a coroutine works for: read wherever it is measured, traced or logged."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

ACCESS = "wingbeat.access"
"""The logger of the access log, whose lines have the request's id anyway."""


@dataclass
class RequestContext:
    """One HTTP request."""

    request_id: str = ""
    """Its `X-Request-Id`."""
    session_id: str = ""
    """Its `X-Session-Id`; empty where it has none."""
    arrived_at: float = field(default_factory=time.perf_counter)
    status: int = 0
    """Of its answer, once that has begun."""
    span: Any = None
    """Its OpenTelemetry span; None where requests are not traced."""


_CURRENT: ContextVar[RequestContext | None] = ContextVar("wingbeat_request", default=None)


def enter(context: RequestContext) -> None:
    """Everything this task does from here on, and tasks it starts, is for that request."""
    _CURRENT.set(context)


def current() -> RequestContext | None:
    """The request that this task works for."""
    return _CURRENT.get()


def session_id() -> str:
    """What the request that this task works for gives as its session; empty where it gives none."""
    return "" if (context := current()) is None else context.session_id
