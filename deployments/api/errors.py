"""Errors of the HTTP API, with bodies in the form of OpenAI's API."""

import logging

from wingbeat.deployments.fleet.interface import (
    EngineOverloaded,
    EnginesEnded,
    EngineUnavailable,
    RequestRefused,
    TryLater,
)
from wingbeat.deployments.parts import hooks

logger = logging.getLogger(__name__)


SHOWN_CHARS = 80
"""Maximum characters of a caller's own text in an error message."""


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


class ApiError(Exception):
    """An error answer: HTTP status, body in OpenAI's form, and headers.

    The class does not derive from ValueError, so that pydantic does not convert an ApiError that a validator raises.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict:
        """Returns the JSON body: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def error_body(path: str, error: ApiError) -> dict:
    """Returns the JSON body of an error in the form that clients of the endpoint at `path` expect."""
    forms = (form(path, error) for form in hooks("error_body"))
    return next((form for form in forms if form is not None), None) or error.body()


def unknown_model(model: str, served: str) -> ApiError:
    """Returns a 404 for a model that is not served here."""
    message = f"The model {shown(model)!r} does not exist; this server has {served!r}."
    return ApiError(message, status=404, param="model", code="model_not_found")


def shown(text: str) -> str:
    """Shortens a caller's own text to `SHOWN_CHARS` characters."""
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def as_api_error(error: Exception) -> ApiError:
    """Converts any exception of a request to an error answer; unexpected exceptions become a 500 without details."""
    match error:
        case ApiError():
            return error
        case EngineOverloaded():
            return _try_later(error, "All engines are busy. Retry shortly.", "engine_overloaded")
        case EngineUnavailable():
            return _try_later(error, "No engine is available.", "engine_unavailable")
        case RequestRefused():
            param, _, problem = str(error).partition(" ")
            return invalid(param, problem.removesuffix("."))
    told = error.for_caller if isinstance(error, EnginesEnded) else "The server had an error."
    return ApiError(told, status=500, kind="server_error", code="internal_error")


def log_failure(error: Exception, request_id: str) -> None:
    """Logs an error that is answered by a 500 without details, with the request id that its caller received."""
    if not isinstance(error, ApiError) and as_api_error(error).status == 500:
        logger.error("Request %s failed.", request_id, exc_info=error)


def _try_later(error: TryLater, message: str, code: str) -> ApiError:
    headers = {"Retry-After": str(error.retry_after_s)}
    return ApiError(str(error) or message, status=503, kind="server_error", code=code, headers=headers)


def unsupported(param: str, instead: str | None = None) -> ApiError:
    """Returns a 400 for a field whose value asks for an unsupported feature."""
    hint = f" ({instead})" if instead else ""
    message = f"'{param}' with this value is not supported by this server{hint}; leave it out."
    return ApiError(message, param=param, code="unsupported_parameter")


def invalid(param: str, problem: str) -> ApiError:
    """Returns a 400 for a field with an invalid value."""
    return ApiError(f"'{param}' {problem}.", param=param, code="invalid_value")


def prompt_too_long(param: str, limit: int, num_tokens: int | None) -> ApiError:
    """Returns a 400 for a prompt beyond the context. `num_tokens` is None if tokenizing was stopped at the limit."""
    found = f"more than {limit}" if num_tokens is None else num_tokens
    message = (
        f"This model's maximum context length is {limit} tokens, but the request has {found} tokens in the prompt. "
        "Shorten the prompt."
    )
    return ApiError(message, param=param, code="context_length_exceeded")


def unknown_parameter(param: str) -> ApiError:
    """Returns a 400 for a field that the API does not have."""
    param = shown(param)
    return ApiError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
