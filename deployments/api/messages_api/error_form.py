"""Error bodies in Anthropic's form."""

from typing import Any

from wingbeat.deployments.api.errors import ApiError

MESSAGES_PATH = "/v1/messages"
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def error_form(error: ApiError) -> dict[str, Any]:
    """Returns the JSON body: `{"type": "error", "error": {"type", "message", ..}}`."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {**error.body()["error"], "type": kind}}


def error_body(path: str, error: ApiError) -> dict[str, Any] | None:
    """Returns the JSON body of an error on the Messages API's paths; None for other paths."""
    return error_form(error) if path.startswith(MESSAGES_PATH) else None
