"""Errors that are answered while a client still sends: every client comes to read them, and none sends for ever."""

import asyncio
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest
import uvicorn
from pydantic import SecretStr

from tests.deployments.http_world import FakePool, app_for
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.guard import HttpLimits

LIMIT = 2**20
LIMITS = HttpLimits(max_body_bytes=LIMIT, max_dropped_bytes=16 * 2**20, drop_timeout_s=3.0)
BODY = b" " * (8 * LIMIT)
"""A body larger than the sockets' buffers, so that sending it needs a reader."""
JSON = {"Content-Type": "application/json", "Authorization": "Bearer key"}


@pytest.fixture(scope="module", params=["httptools", "h11"])
def port(request) -> Iterator[int]:
    """Port of a real server whose pool answers "hello world"."""
    app = app_for(FakePool(), Access.of_server("127.0.0.1", api_keys=[SecretStr("key")]), LIMITS)
    config = uvicorn.Config(app, "127.0.0.1", 0, http=request.param, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def by_urllib(port: int, path: str, body: bytes, headers: dict[str, str], method: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def by_http_client(port: int, path: str, body: bytes, headers: dict[str, str], method: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    parts = (body[start : start + 2**16] for start in range(0, len(body), 2**16))
    connection.request(method, path, parts, headers, encode_chunked=True)
    response = connection.getresponse()
    return response.status, response.read()


def by_httpx(port: int, path: str, body: bytes, headers: dict[str, str], method: str) -> tuple[int, bytes]:
    response = httpx.request(method, f"http://127.0.0.1:{port}{path}", content=body, headers=headers, timeout=30)
    return response.status_code, response.content


def by_socket(port: int, path: str, body: bytes, headers: dict[str, str], method: str) -> tuple[int, bytes]:
    """All of it is sent before anything is read."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""])
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


@pytest.mark.few(10)
@pytest.mark.parametrize("send", [by_urllib, by_http_client, by_httpx, by_socket])
@pytest.mark.parametrize(
    ("status", "path", "headers", "method"),
    [
        (413, "/v1/completions", JSON, "POST"),
        (401, "/v1/completions", {**JSON, "Authorization": "Bearer other"}, "POST"),
        (415, "/v1/completions", {**JSON, "Content-Type": "text/plain"}, "POST"),
        (400, "/v1/completions", {**JSON, "X-Request-Id": "x" * 200}, "POST"),
        (403, "/v1/completions", {**JSON, "Origin": "http://elsewhere.example"}, "POST"),
        (404, "/nowhere", JSON, "POST"),
        (405, "/v1/completions", JSON, "PUT"),
    ],
)
def test_every_client_reads_why_its_body_is_not_taken(port, send: Callable, status, path, headers, method):
    for _ in range(6 if status == 413 else 2):
        got, content = send(port, path, BODY, headers, method)
        assert got == status
        assert json.loads(content)["error"]["message"]


def test_a_short_body_costs_no_connection(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(3):
            response = client.post("/v1/completions", content=b"{}", headers={"Content-Type": "application/json"})
            assert response.status_code == 401
            assert "close" not in response.headers.get("connection", "")


def test_whoever_sends_for_ever_is_cut_off(port):
    """The connection is cut after `max_dropped_bytes` and the contents of the sockets' buffers."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    num_sent = 0
    with socket.create_connection(("127.0.0.1", port), 30) as connection, suppress(OSError):
        connection.sendall(head)
        while num_sent < 20 * LIMITS.max_dropped_bytes:
            connection.sendall(chunk)
            num_sent += len(chunk)
    assert LIMITS.max_dropped_bytes <= num_sent < 3 * LIMITS.max_dropped_bytes


def test_whoever_announces_and_waits_is_answered_and_not_asked_for_the_body(port):
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999999\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(head)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"100 Continue" not in answer
