"""The HTTP server of a router that listens itself."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

KEEP_ALIVE_S = 90
"""For connections without a request; as Serve's proxy has it."""
POLL_S = 0.01


class HttpServer:
    """Serves an application on a socket that is bound already, in the running event loop.

    Args:
        max_requests: at once; others wait.
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
        """Returns when it answers.

        Raises:
            OSError: another process listens at this address by now.
        """
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._bound]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(POLL_S)
        if self._serving.done():
            self._bound.close()
            await self._serving

    async def close(self, timeout_s: float) -> None:
        """Accept nothing more, close connections without a request, and the others when theirs is answered.

        What still runs at the timeout is cancelled.
        """
        # Uvicorn reads it when it comes to that.
        self._server.config.timeout_graceful_shutdown = timeout_s
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for whoever runs this process."""
        yield


class _Turnstile:
    """Lets so many requests in at once, as Serve does for a replica that its proxy asks."""

    def __init__(self, app: ASGIApp, places: int) -> None:
        self._app = app
        self._places = asyncio.Semaphore(places)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._places:
            await self._app(scope, receive, send)
