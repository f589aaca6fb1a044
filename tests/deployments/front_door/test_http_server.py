"""A router's own HTTP server on a socket that was bound elsewhere."""

import asyncio
import socket
from typing import Self

import pytest
from starlette.types import Receive, Scope, Send

from wingbeat.deployments.bound_socket import bind
from wingbeat.deployments.front_door.http_server import HttpServer

REQUEST = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"


class App:
    """Answers `/` at once, and anything else when it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.inside = self.cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside += 1
        if scope["path"] != "/":
            try:
                await self.may.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        self.inside -= 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Client:
    """A client with one connection."""

    async def ask(self, bound: socket.socket, path: bytes = b"") -> Self:
        self._reader, self._writer = await asyncio.open_connection(*bound.getsockname())
        self._writer.write(REQUEST % path)
        return self

    async def answer(self) -> bytes:
        async with asyncio.timeout(20):
            return await self._reader.readuntil(b"ok")

    def close(self) -> None:
        self._writer.close()

    async def end(self) -> bytes:
        """Bytes until the server closes the connection."""
        async with asyncio.timeout(20):
            return await self._reader.read()


def test_at_its_end_idle_connections_close_running_requests_are_answered_and_nobody_else_is():
    async def scenario() -> None:
        app, bound = App(), bind("127.0.0.1", 0)
        address = bound.getsockname()
        server = HttpServer(app, bound, max_requests=10)
        await server.start()
        idle = await Client().ask(bound)
        await idle.answer()
        running = await Client().ask(bound, b"long")
        while not app.inside:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(server.close(20.0))
        assert await idle.end() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        app.may.set()
        assert b"200 OK" in await running.answer()
        await closing

    asyncio.run(scenario())


def test_what_runs_at_the_timeout_is_cancelled():
    async def scenario() -> None:
        app, bound = App(), bind("127.0.0.1", 0)
        server = HttpServer(app, bound, max_requests=10)
        await server.start()
        client = await Client().ask(bound, b"long")
        while not app.inside:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            await server.close(0.2)
        assert app.cancelled == 1
        client.close()

    asyncio.run(scenario())


def test_requests_above_the_limit_wait():
    async def scenario() -> None:
        app, bound = App(), bind("127.0.0.1", 0)
        server = HttpServer(app, bound, max_requests=2)
        await server.start()
        clients = [await Client().ask(bound, b"long") for _ in range(5)]
        while app.inside < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert app.inside == 2
        app.may.set()
        await asyncio.gather(*(client.answer() for client in clients))
        await server.close(20.0)

    asyncio.run(scenario())


def test_an_address_that_another_server_took_meanwhile_is_an_error():
    async def scenario() -> None:
        with bind("127.0.0.1", 0) as first, bind(*first.getsockname()) as second:
            first.listen()
            with pytest.raises(OSError, match="in use"):
                await HttpServer(App(), second, max_requests=1).start()

    asyncio.run(scenario())
