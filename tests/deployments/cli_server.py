"""A server that commands speak to over HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest


class Server(HTTPServer):
    """Answers every request with the scripted answer, and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple] = []
        self.answer: tuple[int, object] = (200, {})
        self.headers: dict[str, str] = {}


class Handler(BaseHTTPRequestHandler):
    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fields = json.loads(body) if body else None
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization"), fields))
        status, answer = self.server.answer
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST = do_DELETE = _do

    def log_message(self, *args) -> None:
        """Nothing is logged."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("WINGBEAT_OPERATOR_KEY", raising=False)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()
