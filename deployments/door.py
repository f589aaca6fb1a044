"""The socket that clients connect to: bound once by the launcher, and lent to every router that starts.

A router that dies takes with it the connections that it had accepted. The port stays bound, so that no other bind can
fail, and whoever connects meanwhile waits in the kernel's queue for the next router. The first router is what makes
the socket listen: before, connections are refused.
"""

import array
import os
import secrets
import socket
import struct
import threading
from typing import NamedTuple, Self

HAND_OVER_S = 60.0
"""A launcher that gets no processor may take as long to hand its socket over."""
MAX_CALLERS = 16
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer."""


class DoorError(RuntimeError):
    """The launcher's socket cannot be had; one line."""


class DoorKey(NamedTuple):
    """What a router needs to get the launcher's socket."""

    name: str
    """Of a Unix socket in the abstract namespace: nothing of it is left where the launcher is killed."""
    host: str
    """The address that the socket is bound to, as the operator wrote it."""

    def take(self) -> socket.socket:
        """The launcher's socket, in this process.

        Raises:
            DoorError: there is no launcher, it is another user's, or it has not answered.
        """
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(HAND_OVER_S)
            try:
                caller.connect(f"\0{self.name}")
                if _peer_user(caller) != os.geteuid():
                    raise DoorError("another user's process has taken the launcher's place")
                _, fds, _, _ = socket.recv_fds(caller, 1, 1)
            except OSError as error:
                raise DoorError(f"the launcher does not hand its socket over: {error}") from error
            if not fds:
                raise DoorError("the launcher has closed its socket")
            return socket.socket(fileno=fds[0])


class Door:
    """The launcher's side.

    Raises:
        OSError: nobody can listen at that address.
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
        """That of the bound socket."""
        return self._bound.getsockname()[1]

    def close(self) -> None:
        """Lend the socket to nobody any more. The port is refused once the router that has it lets go of it."""
        # A thread that waits in accept() hears of a shutdown, but not of a close.
        try:
            self._callers.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed before
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
                    continue  # it has gone, or the door is closed


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet.

    Raises:
        OSError: the host is none of this machine's, the port is in use, or may not be used.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        # Connections of a server before may be in TIME_WAIT; a server that listens is in the way all the same.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _peer_user(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1]
