"""Context variable that holds the HTTP request on whose behalf a coroutine runs. Metrics, traces and logs read the
variable.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

ACCESS = "wingbeat.access"
"""Logger name of the access log, whose lines already contain the request id."""


@dataclass
class RequestContext:
    """State of one HTTP request."""

    request_id: str = ""
    """The request's `X-Request-Id`."""
    session_id: str = ""
    """The request's `X-Session-Id`; empty if absent."""
    arrived_at: float = field(default_factory=time.perf_counter)
    """Value of `time.perf_counter` in seconds when the request arrived."""
    status: int = 0
    """HTTP status of the answer; 0 until the answer has begun."""
    span: Any = None
    """The request's OpenTelemetry span; None if requests are not traced."""


_CURRENT: ContextVar[RequestContext | None] = ContextVar("wingbeat_request", default=None)


def enter(context: RequestContext) -> None:
    """Makes `context` the current request of this task and of tasks that it starts from now on."""
    _CURRENT.set(context)


def current() -> RequestContext | None:
    """Returns the current request of this task; None if there is none."""
    return _CURRENT.get()


def session_id() -> str:
    """Returns the session id of the current request; empty if there is none."""
    return "" if (context := current()) is None else context.session_id
