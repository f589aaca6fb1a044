"""Sends a case to an ASGI application without a socket."""

import asyncio
from urllib.parse import unquote

from .case import Case
from .client import Answer


async def call(app, case: Case) -> Answer:
    """The application's answer, all of it."""
    target, _, query = case.target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": unquote(target),
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.strip().encode("latin-1")) for name, value in case.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    messages = [{"type": "http.request", "body": case.body or b"", "more_body": False}]
    answer = Answer()

    async def receive() -> dict:
        if messages:
            return messages.pop()
        # The client stays until it has its answer.
        await asyncio.Event().wait()

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
        else:
            answer.body += message.get("body", b"")
            answer.complete = not message.get("more_body", False)

    await app(scope, receive, send)
    return answer
