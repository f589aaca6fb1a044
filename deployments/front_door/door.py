"""The server socket (the "door"), which the launcher binds once and sends to each router that starts.

If a router dies, the connections that it had accepted are lost. But the launcher keeps the port bound, so clients that
connect after that wait in the kernel's queue for the next router, which need not bind the port again. Until the first
router calls listen(), connections are refused.
"""

import array
import asyncio
import os
import secrets
import socket
import struct
import threading
from typing import NamedTuple, Self

from starlette.types import ASGIApp

from wingbeat.deployments.bound_socket import bind
from wingbeat.deployments.front_door.http_server import HttpServer

HAND_OVER_S = 60.0
"""Maximum seconds to wait for the launcher's socket; on a busy machine the launcher may get no CPU time for a long
time.
"""
MAX_CALLERS = 16
_CREDENTIALS = struct.Struct("3i")
"""Layout of the socket option SO_PEERCRED: ids of a peer's process, user and group."""


class DoorError(RuntimeError):
    """The launcher's socket cannot be received; the message is one line that gives the reason."""


class DoorKey(NamedTuple):
    """Address at which a router receives the launcher's socket."""

    name: str
    """Name of a Unix socket in the abstract namespace, which the kernel removes when the launcher ends, even if it is
    killed.
    """
    host: str
    """Address that the server socket is bound to, as the operator wrote it."""

    def receive_socket(self) -> socket.socket:
        """Receives the launcher's server socket.

        Raises:
            DoorError: the launcher is gone, belongs to another user, or has not answered.
        """
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(HAND_OVER_S)
            try:
                caller.connect(f"\0{self.name}")
                if _peer_user(caller) != os.geteuid():
                    raise DoorError("another user's process answers at the launcher's address")
                _, fds, _, _ = socket.recv_fds(caller, 1, 1)
            except OSError as error:
                raise DoorError(f"the launcher has not sent its server socket: {error}") from error
            if not fds:
                raise DoorError("the launcher has closed its socket")
            return socket.socket(fileno=fds[0])

    async def listen(self, app: ASGIApp, max_requests: int) -> HttpServer:
        """Receives the launcher's socket and serves the application on it; see `HttpServer`.

        Raises the errors of `receive_socket` and `HttpServer.start`.
        """
        server = HttpServer(app, await asyncio.to_thread(self.receive_socket), max_requests)
        await server.start()
        return server


class Door:
    """The launcher's side: binds the server socket and sends it to routers of the same user.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._bound = bind(host, port)
        self.key = DoorKey(f"wingbeat-{secrets.token_hex(16)}", host)
        self._callers = socket.socket(socket.AF_UNIX)
        self._callers.bind(f"\0{self.key.name}")
        self._callers.listen(MAX_CALLERS)
        threading.Thread(target=self._answer, name="wingbeat-door", daemon=True).start()

    @property
    def port(self) -> int:
        """Port of the bound socket."""
        return self._bound.getsockname()[1]

    def close(self) -> None:
        """Stops sending the socket.

        Connections to the port are refused once the router that has the socket has closed its copy too.
        """
        # shutdown() is called because it wakes the thread that is blocked in accept(); close() alone would not wake the
        # thread.
        try:
            self._callers.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed
        self._callers.close()
        self._bound.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._callers.accept()
            except OSError:
                return
            with caller:
                try:
                    if _peer_user(caller) == os.geteuid():
                        socket.send_fds(caller, [b"\0"], array.array("i", [self._bound.fileno()]))
                except OSError:
                    continue  # the router is gone, or the door is being closed


def _peer_user(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1]


def opened_door(host: str, port: int) -> Door:
    """Returns the door at an address.

    Raises:
        ValueError: the address cannot be bound; the message is one line.
    """
    try:
        return Door(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen on port {port} of {host}: {reason}; give another --port or --host") from error
