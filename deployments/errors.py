"""Errors of the HTTP surface, each with the body OpenAI's API would send for it."""


class EngineOverloaded(Exception):
    """No engine may queue another request; the same request can succeed a moment later."""

    def __init__(self, message: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(Exception):
    """No engine is there to take the request, or the one that had it is gone."""

    def __init__(self, message: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(Exception):
    """Processing this request raised in its engine; the engine and its other requests go on."""


class ApiError(Exception):
    """An answer other than 200: HTTP status, OpenAI error body, headers.

    Not a ValueError on purpose: raised inside a pydantic validator it reaches the caller unchanged.
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
        """The JSON body: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unknown_model(model: str, served: str) -> ApiError:
    """404 for a model that is not served here."""
    message = f"The model {model!r} does not exist; this server has {served!r}."
    return ApiError(message, status=404, param="model", code="model_not_found")


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception a request can end with; unexpected ones become a 500 without details."""
    match error:
        case ApiError():
            return error
        case EngineOverloaded():
            message = str(error) or "All engines are busy. Retry shortly."
            retry = {"Retry-After": "1"}
            return ApiError(message, status=503, kind="server_error", code="engine_overloaded", headers=retry)
        case EngineUnavailable():
            message = str(error) or "No engine is available."
            return ApiError(message, status=503, kind="server_error", code="engine_unavailable")
    return ApiError("The server had an error.", status=500, kind="server_error", code="internal_error")
