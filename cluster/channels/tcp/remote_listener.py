"""Where drafters of a remote channel connect: lets those in that prove its secret, and closes all others."""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.tcp.remote_handshake import HELLO_BYTES, Hello, greeting, read_hello
from wingbeat.runtime.protocol.messages import ChannelSpec

MOST_PENDING = 16
"""Connections that have not proved themselves; one more, and the oldest is closed."""
HANDSHAKE_S = 5.0

Admit = Callable[[socket.socket, Hello], None]
"""Called in the listener's thread, with a connection that has proved the secret and is the caller's from then on."""


@dataclass
class _Stranger:
    sock: socket.socket
    greeted: bytes
    deadline: float
    said: bytes = field(default=b"")


class Listener:
    """A port of this node, and the thread that answers it; handshakes wait for nobody.

    Args:
        host: address of this node to listen on.

    Raises:
        ChannelError: it cannot be listened on.
    """

    def __init__(self, host: str, secret: bytes, spec: ChannelSpec, admit: Admit) -> None:
        self._secret, self._spec, self._admit = secret, spec, admit
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.bind((host, 0))
            self._sock.listen(MOST_PENDING)
        except OSError as error:
            self._sock.close()
            raise ChannelError(f"the remote channel cannot listen on {host}: {error}") from None
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._pending: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="wingbeat-remote-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; harmless a second time."""
        with contextlib.suppress(OSError):
            self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        while True:
            deadlines = [stranger.deadline for stranger in self._pending.values()]
            patience_s = max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None
            ready = [key.fileobj for key, _ in self._selector.select(patience_s)]
            if self._woken in ready:
                break
            for sock in ready:
                if sock is self._sock:
                    self._accept()
                elif isinstance(sock, socket.socket) and sock in self._pending:
                    self._hear(self._pending[sock])
            for stranger in [s for s in self._pending.values() if s.deadline <= time.monotonic()]:
                self._forget(stranger).close()
        for stranger in list(self._pending.values()):
            self._forget(stranger).close()
        self._selector.close()
        self._sock.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:  # it has left again, or this process has too many files open
            time.sleep(0.01)
            return
        sock.setblocking(False)
        stranger = _Stranger(sock, greeting(), time.monotonic() + HANDSHAKE_S)
        try:
            sock.send(stranger.greeted)
        except OSError:
            sock.close()
            return
        if len(self._pending) == MOST_PENDING:
            self._forget(next(iter(self._pending.values()))).close()
        self._pending[sock] = stranger
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, stranger: _Stranger) -> None:
        try:
            part = stranger.sock.recv(HELLO_BYTES - len(stranger.said))
        except OSError:
            part = b""
        stranger.said += part
        if part and len(stranger.said) < HELLO_BYTES:
            return
        sock = self._forget(stranger)
        hello = None
        if len(stranger.said) == HELLO_BYTES:
            hello = read_hello(stranger.said, stranger.greeted, self._secret, self._spec)
        if hello is None:
            sock.close()
        else:
            self._admit(sock, hello)

    def _forget(self, stranger: _Stranger) -> socket.socket:
        self._selector.unregister(stranger.sock)
        del self._pending[stranger.sock]
        return stranger.sock
