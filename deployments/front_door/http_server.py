"""The HTTP server of a router that listens on a socket itself instead of getting requests from Serve's proxy."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

KEEP_ALIVE_S = 90
"""Seconds that an idle connection stays open; Serve's proxy has the same value."""
POLL_S = 0.01


class HttpServer:
    """Serves an ASGI application on a bound socket, in the running event loop.

    Args:
        max_requests: requests that run at once; further requests wait.
    """

    def __init__(self, app: ASGIApp, bound: socket.socket, max_requests: int) -> None:
        self._bound = bound
        config = uvicorn.Config(
            _Turnstile(app, max_requests),
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="critical",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        """Starts the server; returns when the server accepts requests.

        Raises:
            OSError: another process has started to listen on this address.
        """
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._bound]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(POLL_S)
        if self._serving.done():
            self._bound.close()
            await self._serving

    async def close(self, timeout_s: float) -> None:
        """Stops accepting connections; closes idle connections at once, and each busy connection after its answer.

        Requests that still run at the timeout are cancelled.
        """
        # The timeout can be set as late as here, because uvicorn reads the timeout only when it shuts down.
        self._server.config.timeout_graceful_shutdown = timeout_s
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers, because the router's process handles signals."""
        yield


class _Turnstile:
    """Limits concurrent requests to `places`, as Serve limits the requests from its proxy to a replica."""

    def __init__(self, app: ASGIApp, places: int) -> None:
        self._app = app
        self._places = asyncio.Semaphore(places)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._places:
            await self._app(scope, receive, send)
