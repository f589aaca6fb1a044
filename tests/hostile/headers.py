"""Values for the request line and the headers, good and bad ones, side by side."""

from .contract import KEY, MODEL


def _lines(text: str) -> tuple[str, ...]:
    """Values, each on a line of `text`."""
    return tuple(text.strip().splitlines())


HOSTS = (
    "",
    "a" * 3000,
    *[
        "localhost",
        "localhost:8000",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:8000",
        "LocalHost",
        "localhost.",
        "localhost:99999999",
        "127.1",
    ],
    *[
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "127.0.0.2",
        "0.0.0.0",
        "[::]",
        "::1",
        "2130706433",
    ],
    *["localhost:80@evil.example", "evil.example:localhost"],
)
ORIGINS = (
    "http://localhost evil",
    *[
        "http://localhost:3000",
        "http://127.0.0.1:5173",
        "http://[::1]:1",
        "http://localhost",
        "http://127.0.0.1",
        "null",
        "file://",
        "*",
    ],
    *[
        "http://evil.example",
        "https://localhost.evil.example",
        "http://127.0.0.1@evil.example",
        "HTTP://LOCALHOST",
        "http://",
    ],
    *[
        "localhost",
        "http://localhost:3000/",
        "chrome-extension://abc",
        "https://localhost:8443",
        "http://evil.example#localhost",
    ],
)
KEYS = _lines(
    f"""
Bearer
Bearer null
bearer {KEY}
Bearer  {KEY}
Bearer {KEY}x
Bearer {KEY[:-1]}
Bearer {KEY.upper()}
Bearer {KEY} {KEY}
Bearer {KEY},x
Token {KEY}
Basic eDp5
{KEY}
"""
)
TYPES = _lines(
    """

application/json; charset=utf-8
application/json;charset=UTF-8
Application/JSON
application/json;
application/jsonx
application/json, text/plain
application/vnd.api+json
application/x-www-form-urlencoded
multipart/form-data
text/plain
text/plain; application/json
text/json
json
*/*
"""
)
REQUEST_IDS = (
    "abc-123",
    "x" * 128,
    "x" * 129,
    "a b",
    "!~",
    "",
    "x" * 5000,
    "a\tb",
    '"<script>"',
    "%00",
    "{}",
)
PATHS = (
    f"/v1/models/{'m' * 3000}",
    "/a" * 500,
    *[
        "/",
        "/v1",
        "/v1/",
        "/v1/completions/",
        "/v1/completion",
        "/v1/Completions",
        "/V1/completions",
        "/v2/completions",
        "/v1/chat",
    ],
    *[
        "/v1/chat/completions/",
        "/v1/embedding",
        "/v1/responses/",
        "/health/",
        "/healthz",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/metrics",
    ],
    *f"/v1/models /v1/models/ /v1/models/{MODEL} /v1/models/{MODEL}/ /v1/models/gpt-4o /v1/models/a/b".split(),
    *["/v1/models/..", "/v1/models/%00", "/v1/models/%ff", "/v1//completions", "/v1/./completions", "/v1/../health"],
    *["/v1/completions;x", "/%2e%2e/etc/passwd", "/health?x=1", "/v1/models?limit=-1", "/v1/completions?api-version=1"],
    *["/favicon.ico", "/.env", "/index.html"],
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "POST")
