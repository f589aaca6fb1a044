"""Listening port of a remote channel: accepts drafters that prove its secret, and closes all other connections."""

import socket
import threading
import time
from collections.abc import Callable

from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.tcp.remote_handshake import HANDSHAKE_S, Hello, hang_up, meet
from wingbeat.runtime.protocol.messages import ChannelSpec

MOST_PENDING = 16
"""Maximum number of connections that have not proved the secret yet; a further connection closes the oldest of them."""

Admit = Callable[[socket.socket, Hello], None]
"""Called in its own thread with an authenticated socket, which the callee owns from then on."""


class Listener:
    """A port of this node with its accepting thread.

    Each connection has its own thread, so that none waits for another.

    Args:
        host: address of this node to listen on.

    Raises:
        ChannelError: this process cannot listen on the address.
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
        self.port: int = self._sock.getsockname()[1]
        self._lock = threading.Lock()
        self._pending: list[socket.socket] = []
        """Connections that have not proved the secret yet, oldest first."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wingbeat-remote-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; does nothing when repeated."""
        self._closed = True
        hang_up(self._sock)
        if threading.current_thread() is not self._thread:
            self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # the listener was closed, the client has left, or too many files are open
                time.sleep(0.01)
                continue
            with self._lock:
                if len(self._pending) == MOST_PENDING:
                    hang_up(self._pending.pop(0))
                self._pending.append(sock)
            try:
                threading.Thread(target=self._meet, args=(sock,), name="wingbeat-remote-stranger", daemon=True).start()
            except RuntimeError:  # with too many threads, refuse this connection but keep the listener running
                with self._lock:
                    self._pending.remove(sock)
                sock.close()
        self._sock.close()
        with self._lock:
            for sock in self._pending:
                hang_up(sock)

    def _meet(self, sock: socket.socket) -> None:
        hello = meet(sock, self._secret, self._spec)
        with self._lock:
            was_pending = sock in self._pending
            if was_pending:
                self._pending.remove(sock)
        if hello is None or not was_pending:
            sock.close()
        else:
            self._admit(sock, hello)
